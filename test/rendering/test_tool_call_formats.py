"""Formats of tool calls: what the templates of their families write is read back, and what cannot be read is said."""

from __future__ import annotations

import pickle

import pytest
from real_templates import REWRITTEN, real_renderer
from rendering_families import family_renderer

from llmrl.rendering import TOOL_CALL_PARSERS, Conversation
from llmrl.rendering.tool_calls import TOOL_CALL_WRITERS, ParsedCalls, make_tool_call

KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
WRITTEN = {
    "apertus": '<|tools_prefix|>[{"add": {"a": 1}}, {"add": {"a": 1}}]<|tools_suffix|>',
    "deepseek_v32": "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "kimi_k2": KIMI.format(
        '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    ),
    "minimax_m2": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
    '<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax_m3": '<tool_call>\n<invoke name="add">\n<a>1</a>\n</invoke>\n<invoke name="add">\n<a>1</a>\n</invoke>\n'
    "</tool_call>".replace("<", "]<]minimax[>[<"),
    "seed_oss": "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>" * 2,
    "lfm2_raw": "<|tool_call_start|>[add(a=1), add(a=1)]<|tool_call_end|>",
}
WRITTEN["deepseek_v4"] = WRITTEN["deepseek_v32"].replace("function_calls", "tool_calls")
WRITTEN["deepseek_v41"] = WRITTEN["deepseek_v32"].replace("｜DSML｜function_calls", "｜DSML｜ calls")
for part in ("invoke", "parameter"):
    WRITTEN["deepseek_v41"] = WRITTEN["deepseek_v41"].replace(f"｜DSML｜{part}", f"｜DSML｜ {part}")


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_as_their_family_writes_them_are_read(name):
    parsed = TOOL_CALL_PARSERS[name](WRITTEN[name])
    assert [call["function"] for call in parsed.tool_calls] == [{"name": "add", "arguments": {"a": 1}}] * 2
    assert parsed.content == "" and not parsed.malformed


@pytest.mark.parametrize("name", WRITTEN)
def test_a_call_that_is_cut_anywhere_is_not_taken_for_another(name):
    whole = WRITTEN[name].strip()
    for end in range(len(whole)):
        parsed = TOOL_CALL_PARSERS[name](whole[:end])
        if parsed.malformed:
            assert parsed.malformed[0].reason and parsed.malformed[0].raw.strip() in parsed.content
        calls = [call["function"] for call in parsed.tool_calls]
        assert calls in ([], [{"name": "add", "arguments": {"a": 1}}]) and len(parsed.malformed) <= 1


@pytest.mark.parametrize("family", REWRITTEN)
def test_a_template_of_the_family_chooses_its_parser(model_path, family):
    renderer = real_renderer(model_path, family)
    assert renderer.tool_parser == family and not renderer.tool_fault and not renderer.is_tool_prompt_added


@pytest.mark.parametrize("name", TOOL_CALL_PARSERS)
def test_a_parser_and_its_writer_travel_to_other_processes(name):
    parse, write = pickle.loads(pickle.dumps((TOOL_CALL_PARSERS[name], TOOL_CALL_WRITERS.get(name))))
    assert parse("Hello.").content == "Hello."
    if write is not None:
        assert parse(write("f", {"a": 1})).tool_calls[0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_ids_of_calls_that_are_names_are_kept():
    calls = TOOL_CALL_PARSERS["kimi_k2"](WRITTEN["kimi_k2"]).tool_calls
    assert [call["id"] for call in calls] == ["functions.add:0", "functions.add:1"]


def test_the_id_beside_a_function_is_that_of_the_call():
    call = '{"type": "function", "id": "abc", "function": {"name": "f", "arguments": {}}}'
    assert TOOL_CALL_PARSERS["hermes"](f"<tool_call>{call}</tool_call>").tool_calls[0]["id"] == "abc"


@pytest.mark.parametrize("sampled", ["1", "abc-defgh", "abcdéfghi", ""])
def test_a_call_of_mistral_with_an_id_that_its_template_refuses_gets_another(model_path, sampled):
    renderer = family_renderer(model_path, "mistral")
    conversation = Conversation.start(renderer).with_prompt([{"role": "user", "content": "a"}])
    ids = renderer.encode(f'[TOOL_CALLS][{{"name": "f", "arguments": {{}}, "id": "{sampled}"}}]</s>')
    conversation = conversation.with_completion(ids, log_probs=[0.0] * len(ids), versions=[0] * len(ids))
    (call,) = conversation.last.message["tool_calls"]
    assert call["id"] == "call00000"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
    following = conversation.with_prompt([*conversation.messages, result])
    assert following.prompt_ids[: conversation.num_tokens] == conversation.prompt_ids


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("xml", "<function=f><parameter=a>1</function>", "expected at '<parameter=a>1"),
        ("xml", "<function=f>what<parameter=a>1</parameter></function>", "expected at 'what"),
        ("xml", "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "'a' is written twice"),
        ("glm", "f<arg_key>a</arg_key><arg_value>1</arg_value>what", "expected at 'what"),
        ("glm", "f<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>a</arg_key><arg_value>2</arg_value>", "twice"),
        ("hermes", '{"name": "f", "arguments": {"a": NaN}}', "not JSON"),
        ("hermes", '{"name": "f", "arguments": {"a": 1e999}}', "not JSON"),
    ],
)
def test_what_is_not_all_of_a_call_is_no_call(name, body, reason):
    parsed = TOOL_CALL_PARSERS[name](f"<tool_call>{body}</tool_call>")
    assert not parsed.tool_calls and reason in parsed.malformed[0].reason


@pytest.mark.parametrize("text", ['[{"type": "circle", "r": 1}]', "[]", '{"content": []}', '[{"type": ["text"]}]'])
def test_json_that_has_no_blocks_is_an_answer(text):
    parsed = TOOL_CALL_PARSERS["anthropic"](text)
    assert parsed.content == text and not parsed.tool_calls and not parsed.malformed


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Alice", "age": 3}', '{"type": "object", "properties": {}}', '{"parameters": {"a": 1}}',
        '{"function": {"name": "sin"}, "parameters": [1]}', '{"function": "sin", "name": "x"}\nDone.',
    ],
)  # fmt: skip
def test_a_json_object_without_a_name_and_parameters_is_an_answer(model_path, text):
    renderer = family_renderer(model_path, "llama3")
    assert renderer.tool_parser == "llama3_json"
    parsed = renderer.parse(renderer.encode(f"{text}<|eot_id|>"))
    assert parsed.message == {"role": "assistant", "content": text} and not parsed.malformed_tool_calls


@pytest.mark.parametrize(
    "text", ['{"name": "f", "parameters": {}}', '{"type": "function", "function": {"name": "f", "arguments": {}}}']
)
def test_a_json_object_with_a_name_and_parameters_is_a_call(text):
    (call,) = TOOL_CALL_PARSERS["llama3_json"](text).tool_calls
    assert call["function"] == {"name": "f", "arguments": {}}


def test_an_object_of_minimax_with_a_property_that_is_called_item_is_no_list():
    schema = {"type": "object", "properties": {"item": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"order": schema}}}}
    text = '<tool_call><invoke name="f"><order><item>pen</item></order></invoke></tool_call>'
    for tools, order in (([tool], {"item": "pen"}), ([], ["pen"])):
        (call,) = TOOL_CALL_PARSERS["minimax_m3"](text.replace("<", "]<]minimax[>[<"), tools).tool_calls
        assert call["function"]["arguments"] == {"order": order}


def test_a_call_after_thinking_is_read():
    call = '{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}'
    parsed = TOOL_CALL_PARSERS["anthropic"](f'[{{"type": "thinking", "thinking": "hm", "signature": "s"}}, {call}]')
    assert [one["function"] for one in parsed.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]


def test_a_glm4_call_with_arguments_that_are_no_json_is_malformed():
    parsed = TOOL_CALL_PARSERS["glm4"]('add\n{"a": 1}\nadd\n{"a": NaN}')
    assert [call["function"] for call in parsed.tool_calls] == [{"name": "add", "arguments": {"a": 1}}]
    assert [bad.raw.strip() for bad in parsed.malformed] == ['add\n{"a": NaN}']
    assert TOOL_CALL_PARSERS["glm4"]('add\n{"a": NaN}').content == 'add\n{"a": NaN}'


def test_a_glm4_answer_that_looks_like_a_call_is_a_call_only_if_a_tool_is_named():
    parse = TOOL_CALL_PARSERS["glm4"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    prose = 'Result\n{"sum": 3}\nNote that this is JSON.'
    assert parse(prose, tools) == ParsedCalls(prose)
    assert [call["function"]["name"] for call in parse('add\n{"a": 1}', tools).tool_calls] == ["add"]
    several = parse('find\n{"a": 1}<|assistant|>add\n{"a": 1}', tools)  # the error of the first is the model's to read
    assert [call["function"]["name"] for call in several.tool_calls] == ["find", "add"]


@pytest.mark.parametrize("written", ["{1, 2}", "b'x'", "...", "1j", "{[]: 1}", "1e999"])
def test_python_s_values_that_are_no_json_are_no_arguments(written):
    parsed = TOOL_CALL_PARSERS["pythonic"](f"[f(a={written})]")
    assert not parsed.tool_calls and len(parsed.malformed) == 1
    calls = TOOL_CALL_PARSERS["pythonic"]("[f(a=(1, {2: None}))]").tool_calls
    assert calls[0]["function"]["arguments"] == {"a": [1, {"2": None}]}


def test_a_call_with_arguments_that_are_no_json_is_not_made():
    with pytest.raises(ValueError, match="not JSON"):
        make_tool_call("f", {"a": float("nan")})


def test_texts_that_nothing_escapes_are_read_as_they_are():
    texts = {"a": "C:\\new", "b": "it's", "c": "one\ntwo", "d": "x), f(y='", "e": ""}
    written = ", ".join(f"{key}='{text}'" for key, text in texts.items())
    (call,) = TOOL_CALL_PARSERS["lfm2_raw"](
        f"<|tool_call_start|>[say({written}, n=[None, true])]<|tool_call_end|>"
    ).tool_calls
    assert call["function"]["arguments"] == {**texts, "n": [None, True]}


def test_values_that_a_template_writes_as_python_does_have_their_schema_s_type():
    properties = {"a": {"type": "object"}, "b": {"type": "array"}, "c": {"type": "string"}, "d": {"type": "boolean"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    written = {"a": "{'x': None}", "b": "['y', True]", "c": "{'x': None}", "d": "True"}
    body = "".join(f"<parameter={key}>{text}</parameter>" for key, text in written.items())
    text = f"<seed:tool_call><function=f>{body}</function></seed:tool_call>"
    (call,) = TOOL_CALL_PARSERS["seed_oss"](text, [tool]).tool_calls
    assert call["function"]["arguments"] == {"a": {"x": None}, "b": ["y", True], "c": "{'x': None}", "d": True}


@pytest.mark.parametrize(
    ("name", "opening", "closing"),
    [
        ("glm", "<tool_call>f<arg_key>", "</tool_call>"),
        ("glm4", "", "f"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_calls_section_end|>"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json", "<｜tool▁call▁end｜>"),
        ("lfm2_raw", "<|tool_call_start|>[f(a='", ")]<|tool_call_end|>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="f">', "</minimax:tool_call>"),
    ],
)
def test_much_white_space_is_read_in_one_pass(name, opening, closing):
    parsed = TOOL_CALL_PARSERS[name](opening + " " * 30_000 + closing)  # its square is minutes
    assert not parsed.tool_calls
