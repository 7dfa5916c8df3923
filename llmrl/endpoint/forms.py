"""Grammars of answers of a given form, in the format of a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from llmrl.data import Message, ToolSchema
from llmrl.endpoint.requests import AnswerForm
from llmrl.rendering import Renderer, RenderingError
from llmrl.rendering.reasoning import said_after
from llmrl.rendering.tool_calls import Json, make_tool_call

_ASKED: Message = {"role": "user", "content": "Begin."}
_VALUE = {"llmrl_value": 7}
_MAX_WHITESPACE = 16
"""Maximum number of consecutive white-space characters: enough to indent, but not endless."""
_WRITTEN = re.compile(r'\{\s*"llmrl_value"\s*:\s*7\s*\}')


def grammar_of(form: AnswerForm, renderer: Renderer, tools: Sequence[ToolSchema], *, may_call: bool = True) -> str:
    """Return the structural tag of an answer: JSON of the form's schema, or one call.

    If there are tools and `may_call`, an answer with a schema may be a call instead. Reasoning is not constrained.
    Raises ValueError if the template does not write answers or calls as JSON after its prompt.
    """
    called = [tool["function"] for tool in tools if form.function in ("", tool["function"]["name"])]
    ways = [_call(renderer, function, tools) for function in called if may_call or form.schema is None]
    if form.schema is not None:
        answer: Message = {"role": "assistant", "content": json.dumps(_VALUE)}
        ways.append(_with_value(renderer, answer, form.schema, tools))
    if not ways:
        raise ValueError("there are no tools to call.")
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": ways}})


def _call(renderer: Renderer, function: Mapping[str, Json], tools: Sequence[ToolSchema]) -> Json:
    call = make_tool_call(function["name"], _VALUE)
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return _with_value(renderer, message, function["parameters"], tools)


def _with_value(renderer: Renderer, message: Message, schema: Mapping[str, Json], tools: Sequence[ToolSchema]) -> Json:
    """Return the format of a message in the template, with JSON of the schema for its value."""
    before, after = _around_value(renderer, message, tools)
    marks = renderer.thought_marks
    elements: list[Json] = []
    if marks is not None and marks.closing in before:
        opening, _, before = before.partition(marks.closing)
        begin = marks.opening * (marks.opening in opening)  # otherwise the prompt contains it
        elements.append({"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": marks.closing})
    if before:
        elements.append({"type": "const_string", "value": before})
    elements.append({"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": _MAX_WHITESPACE})
    if after:
        elements.append({"type": "const_string", "value": after})
    return {"type": "sequence", "elements": elements}


def _around_value(renderer: Renderer, message: Message, tools: Sequence[ToolSchema]) -> tuple[str, str]:
    """Return the sampled text before and after the value in a message."""
    try:
        prompt = renderer.decode(renderer.render([_ASKED], tools=tools, add_generation_prompt=True))
        whole = renderer.decode(renderer.render([_ASKED, message], tools=tools))
    except RenderingError as error:
        raise ValueError(str(error)) from error
    common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))))
    text = said_after(prompt[common:], whole[common:], renderer.thought_marks) or ""
    for token_id in renderer.stop_token_ids:
        text = text.partition(renderer.decode([token_id]))[0]
    found = _WRITTEN.search(text)
    if found is None:
        raise ValueError(
            "the model's chat template does not write the answer or call as JSON after the prompt; describe the format "
            "in the prompt instead."
        )
    return text[: found.start()], text[found.end() :]
