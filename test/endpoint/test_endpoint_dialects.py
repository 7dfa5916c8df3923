"""Dialects: whatever stands in a client's JSON, it is read or refused in words, and never fails in the server."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_families import TOOLS

from llmrl.endpoint import RefusedRequest
from llmrl.endpoint.dialects import anthropic, chat, responses

FUNCTION = TOOLS[0]["function"]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TEXT = {"type": "text", "text": "Hi"}
BODIES = {
    chat: {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": [TEXT]},
            {"role": "user", "content": "Hi", "name": "me"},
            {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}, "n": 2, "stop": ["x"],
        "max_tokens": 5, "temperature": 0.5, "seed": 1, "stream": True, "stream_options": {"include_usage": True},
        "logprobs": True, "logit_bias": {}, "reasoning_effort": "low",
    },
    responses: {
        "model": "policy", "instructions": "Be brief.", "previous_response_id": "resp_1",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "text": {"format": {"type": "text"}}, "max_output_tokens": 5, "top_p": 0.5, "stream": False,
        "tool_choice": "auto", "parallel_tool_calls": True, "background": False, "reasoning": {"effort": "low"},
    },
    anthropic: {
        "model": "policy", "system": [TEXT], "max_tokens": 5, "stop_sequences": ["x"], "top_k": 4, "stream": True,
        "messages": [
            {"role": "user", "content": [TEXT]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [TEXT]}, TEXT]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": FUNCTION["parameters"]}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    },
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)


def places(value, path=()):
    """The paths to all that stands in a body."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield (*path, key)
        yield from places(entry, (*path, key))


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_what_stands_in_a_body_is_read_or_refused(dialect):
    body = BODIES[dialect]
    assert dialect.read(body).tools[0]["function"]["name"] == "add"

    @settings(max_examples=150)
    @given(st.sampled_from(list(places(body))), JSON)
    def check(path, value):
        changed = copy.deepcopy(body)
        holder = changed
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        try:
            request = dialect.read(changed)
        except RefusedRequest as refused:
            assert refused.status == 400 and refused.message
            return
        hash(request.messages[-1]["role"])
        assert all(isinstance(name, str) for name in (request.model, *request.stop, *request.overridden))
        assert all(isinstance(tool["function"]["name"], str) for tool in request.tools)

    check()


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_tools_of_another_kind_are_refused_by_name_or_counted(dialect):
    for kind in ("web_search", {"a": 1}):
        tools = [{**BODIES[dialect]["tools"][0], "type": kind}]
        if dialect is responses:  # clients send them with every request, and can do without
            request = dialect.read({**BODIES[dialect], "tools": [*BODIES[dialect]["tools"], *tools]})
            assert len(request.tools) == 1 and f"tools.{kind}" in request.overridden
            continue
        with pytest.raises(RefusedRequest, match=r"tools of type .* are not supported"):
            dialect.read({**BODIES[dialect], "tools": tools})


def test_answers_of_a_given_form_are_read_in_each_dialect():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    named = {"type": "json_schema", "name": "one", "schema": schema}
    asked = {
        chat: ("response_format", {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}),
        responses: ("text", {"format": named}),
        anthropic: ("output_config", {"format": named}),
    }
    for dialect, (option, wanted) in asked.items():
        body = {**BODIES[dialect], option: wanted, "tool_choice": None}
        form = dialect.read(body).form
        assert form.schema == schema and form.is_required and option in form.option
    free = {**BODIES[chat], "tool_choice": None}
    form = chat.read({**free, "response_format": {"type": "json_object"}}).form
    assert form.schema == {"type": "object"} and not form.is_required
    assert chat.read({**free, "response_format": {"type": "text"}}).form is None
    for wrong in ({"type": "json_schema"}, {"type": "regex"}):
        with pytest.raises(RefusedRequest, match=r"response_format"):
            chat.read({**free, "response_format": wrong})
    name = FUNCTION["name"]
    for dialect, choice in (
        (chat, {"type": "function", "function": {"name": name}}),
        (responses, {"type": "function", "name": name}),
        (anthropic, {"type": "tool", "name": name}),
    ):
        form = dialect.read({**BODIES[dialect], "tool_choice": choice}).form
        assert (form.schema, form.function, form.option) == (None, name, "tool_choice")


@pytest.mark.parametrize("dialect", BODIES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_whatever_is_ignored_is_named(dialect):
    asked = {
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "structured_outputs": {"json": {}},
        "guided_json": {"type": "object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7],
        "best_of": 4,
        "functions": [FUNCTION],
    }
    before = set(dialect.read(BODIES[dialect]).overridden)
    assert set(dialect.read({**BODIES[dialect], **asked}).overridden) - before == set(asked)
    tool = BODIES[dialect]["tools"][0]
    strict = {**tool, "function": {**FUNCTION, "strict": True}} if dialect is chat else {**tool, "strict": True}
    assert set(dialect.read({**BODIES[dialect], "tools": [strict]}).overridden) - before == {"tools.strict"}
    # What is unset, or changes no answer, is not.
    for unset in ({"frequency_penalty": 0}, {"logit_bias": None}, {"user": "me"}, {"metadata": {"a": "b"}}):
        assert set(dialect.read({**BODIES[dialect], **unset}).overridden) == before


def test_what_cannot_be_had_is_named():
    asked = {"parallel_tool_calls": False, "tool_choice": {"type": "allowed_tools"}}
    assert chat.read({**BODIES[chat], **asked}).overridden == (
        "reasoning_effort", "tool_choice", "parallel_tool_calls"
    )  # fmt: skip
    assert responses.read({**BODIES[responses], **asked}).overridden == (
        "reasoning", "tool_choice", "parallel_tool_calls"
    )  # fmt: skip
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = {**BODIES[anthropic], "tool_choice": choice, "output_config": {"effort": "low"}}
    assert anthropic.read(body).overridden == ("output_config.effort", "disable_parallel_tool_use")
