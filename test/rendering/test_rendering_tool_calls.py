"""Tool calls and reasoning out of sampled text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrl.rendering import TOOL_CALL_PARSERS, TemplateRenderer, register_tool_call_parser
from llmrl.rendering.reasoning import ThoughtMarks
from llmrl.rendering.tool_calls import TOOL_CALL_WRITERS

CALL = {"name": "add", "arguments": {"a": 1, "text": "}</x>"}}
WELL_FORMED = {
    "hermes": f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>",
    "xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=text>\n}</x>\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": json.dumps({"name": "add", "parameters": CALL["arguments"]}),
    "pythonic": "[add(a=1, text='}</x>')]",
    "mistral": f"[TOOL_CALLS][{json.dumps(CALL)}]",
    "glm": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>text</arg_key>\n<arg_value>}</x></arg_value>\n</tool_call>",
    "glm4": f"add\n{json.dumps(CALL['arguments'])}",
    "lfm2": "<|tool_call_start|>[add(a=1, text='}</x>')]<|tool_call_end|>",
    "gemma4": '<|tool_call>call:add{a:1,text:<|"|>}</x><|"|>}<tool_call|>',
    "deepseek": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{json.dumps(CALL['arguments'])}\n```"
    "<｜tool▁call▁end｜>",
    "cohere": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": '
    f"{json.dumps(CALL['arguments'])}}}]<|END_ACTION|>",
    "granite": f"<|tool_call|>[{json.dumps(CALL)}]",
}
TRUNCATED = {
    "hermes": '<tool_call>\n{"name": "add", "argum',
    "xml": "<tool_call>\n<function=add>\n<parameter=a>",
    "llama3_json": '{"name": "add", "param',
    "pythonic": "[add(a=1, te",
    "mistral": '[TOOL_CALLS][{"name": "add"',
    "glm": "<tool_call>add\n<arg_key>a</arg_key>",
    "lfm2": "<|tool_call_start|>[add(a=1",
    "gemma4": '<|tool_call>call:add{a:1,text:<|"|>}',
    "deepseek": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{",
    "granite": '<|tool_call|>[{"name": ',
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_a_well_formed_call_is_read(name):
    parsed = TOOL_CALL_PARSERS[name](WELL_FORMED[name])
    assert [call["function"] for call in parsed.tool_calls] == [CALL]
    assert parsed.content == "" and parsed.malformed == ()


@pytest.mark.parametrize("name", TRUNCATED)
def test_a_truncated_call_is_malformed_and_stays_in_the_content(name):
    parsed = TOOL_CALL_PARSERS[name](TRUNCATED[name])
    assert parsed.tool_calls == () and len(parsed.malformed) == 1
    assert parsed.malformed[0].raw == TRUNCATED[name] == parsed.content
    assert parsed.malformed[0].reason


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_plain_text_is_content_as_it_is(name):
    for text in ("", " Hello \n", "[1, 2]", '{"a": 1}', "x = [f(1)]", "{"):
        parsed = TOOL_CALL_PARSERS[name](text)
        assert parsed.content == text and parsed.tool_calls == () and parsed.malformed == ()


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
@given(text=st.text(st.sampled_from('abc [](){}<>/"\\:,=\x00\n') | st.characters(), max_size=40), data=st.data())
def test_parsers_never_raise(name, text, data):
    start = data.draw(st.sampled_from(["", "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[f(", '{"name": "f", ']))
    parsed = TOOL_CALL_PARSERS[name](start + text + data.draw(st.sampled_from(["", "</tool_call>", "]", "}", ")]"])))
    assert isinstance(parsed.content, str)


def test_deep_nesting_is_malformed_and_not_a_crash():
    for name, text in (("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>"), ("pythonic", "[f(a=" + "(" * 5_000)):
        assert len(TOOL_CALL_PARSERS[name](text).malformed) == 1


def test_good_and_bad_calls_side_by_side_are_both_kept():
    good, bad = WELL_FORMED["hermes"], "<tool_call>{oops}</tool_call>"
    parsed = TOOL_CALL_PARSERS["hermes"](f"Well. {good}\n{bad}\n{good}")
    assert len(parsed.tool_calls) == 2 and [each.raw for each in parsed.malformed] == [bad]
    assert parsed.content.startswith("Well.") and bad in parsed.content and good not in parsed.content


@pytest.mark.parametrize(
    ("body", "reason"),
    [("[]", "JSON object"), ('{"arguments": {}}', "name"), ('{"name": "f", "arguments": [1]}', "arguments")],
)
def test_the_reason_says_what_is_wrong(body, reason):
    assert reason in TOOL_CALL_PARSERS["hermes"](f"<tool_call>{body}</tool_call>").malformed[0].reason


def test_arguments_as_json_text_are_read():
    parsed = TOOL_CALL_PARSERS["hermes"]('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>')
    assert parsed.tool_calls[0]["function"]["arguments"] == {"a": 1}


def test_mistral_reads_named_calls_and_gives_ids_of_nine_characters():
    parsed = TOOL_CALL_PARSERS["mistral"]('Hm.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}')
    assert [call["function"]["name"] for call in parsed.tool_calls] == ["f", "g"]
    assert [call["id"] for call in parsed.tool_calls] == ["call00000", "abcdefghi"]
    assert parsed.content == "Hm."


def test_llama_reads_several_calls():
    parsed = TOOL_CALL_PARSERS["llama3_json"]('<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g"}')
    assert [call["function"]["name"] for call in parsed.tool_calls] == ["f", "g"]


def test_pythonic_never_evaluates_anything():
    parsed = TOOL_CALL_PARSERS["pythonic"]("[f(a=__import__('os').getcwd())]")
    assert parsed.tool_calls == () and len(parsed.malformed) == 1


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\na\n</think>\n\nb", False, ("a", "b")),
        ("<think>\n\n</think>\n\nb", False, ("", "b")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("a", True, ("a", "")),
        ("b", False, (None, "b")),
        ("b <think>c</think>", False, (None, "b <think>c</think>")),
    ],
)
def test_reasoning_is_split_off(text, is_open, expected):
    assert ThoughtMarks().split(text, is_open=is_open) == expected


def test_parsers_are_named_once_and_unknown_names_are_refused(tokenizer):
    with pytest.raises(ValueError, match="taken"):
        register_tool_call_parser("hermes")(lambda text: None)
    with pytest.raises(ValueError, match="hermes"):
        TemplateRenderer(tokenizer, tool_parser="hermse")


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "90210", "90210"),
        ({"type": "string"}, "true", "true"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
        ({"type": "integer"}, "7", 7),
        ({"type": "boolean"}, "True", True),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "array"}, '["a"]', ["a"]),
        ({}, "7", 7),
        ({}, "seven", "seven"),
    ],
)
@pytest.mark.parametrize("name", ["xml", "glm"])
def test_values_that_are_written_as_bare_text_have_their_schema_s_type(name, schema, text, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}
    written = {
        "xml": f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function></tool_call>",
        "glm": f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
    }
    (call,) = TOOL_CALL_PARSERS[name](written[name], [tool]).tool_calls
    assert call["function"]["arguments"] == {"a": value} and type(call["function"]["arguments"]["a"]) is type(value)


@pytest.mark.parametrize("name", sorted(TOOL_CALL_WRITERS))
@given(
    arguments=st.dictionaries(st.sampled_from("abc"), st.integers() | st.booleans() | st.text("ab'\\\"\n", max_size=4))
)
def test_what_is_written_is_read_back(name, arguments):
    (call,) = TOOL_CALL_PARSERS[name](TOOL_CALL_WRITERS[name]("f", arguments)).tool_calls
    assert call["function"] == {"name": "f", "arguments": arguments}
