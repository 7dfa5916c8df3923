"""Anthropic's messages API (https://docs.anthropic.com/en/api/messages)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from llmrl.data import Message
from llmrl.endpoint.dialects.reading import (
    Body,
    arguments_of,
    call_of,
    checked,
    entry_of,
    form_of,
    function_of,
    object_of,
    overridden,
    positive,
    refuse_other_tools,
    sampling_of,
    stops_of,
    text_parts,
    tools_of,
)
from llmrl.endpoint.dialects.stream import Event, Part, ReplyStream
from llmrl.endpoint.requests import ModelAnswer, ModelReply, ModelRequest, RefusedRequest
from llmrl.rendering.tool_calls import Json, ToolCall

_SIGNATURE = "unsigned"
_EMPTY: dict[Part, dict[str, Json]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""}, "content": {"type": "text", "text": ""},
}  # fmt: skip
"""Blocks without text."""
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}


_READ = (
    "max_tokens", "messages", "model", "output_config", "output_format", "stop_sequences", "stream", "system", "tools",
    "train",
)  # fmt: skip


def read(body: Body) -> ModelRequest:
    """Read a request. Raises RefusedRequest if it is malformed or unsupported.

    Example:
        >>> body = {"model": "policy", "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]}
        >>> [message["role"] for message in read(body).messages]
        ['system', 'user']
    """
    messages: list[Message] = []
    if system := text_parts(body.get("system"), where="system"):
        messages.append({"role": "system", "content": system})
    for place, message in enumerate(entry_of(body, "messages", list, default=[])):
        messages += _messages(message, f"messages[{place}]")
    choice = entry_of(body, "tool_choice", dict, default={})
    refuse_other_tools(body, "custom")
    described = tools_of(body, "custom")
    tools = tuple(function_of(tool, "input_schema", where="tools[].") for tool in described)
    output = entry_of(body, "output_config", dict, default={})
    wanted = entry_of(output, "format", dict, where="output_config.", default=entry_of(body, "output_format", dict))
    return ModelRequest(
        messages=checked(messages),
        model=entry_of(body, "model", str, default=""),
        tools=tools,
        max_tokens=positive(entry_of(body, "max_tokens", int), "max_tokens"),
        stop=stops_of(body.get("stop_sequences"), "stop_sequences"),
        is_streamed=entry_of(body, "stream", bool, default=False),
        may_call=choice.get("type") != "none",
        form=form_of(body, wanted or {}, "output_config.format", tools),
        is_trained=entry_of(body, "train", bool, default=True),
        sampling=sampling_of(body),
        overridden=(
            *(f"output_config.{name:.80}" for name in output if name != "format"),
            *overridden(body, *_READ, tools=described),
            *(name for name in ("disable_parallel_tool_use",) if choice.get(name)),
        ),
    )


def _messages(message: Json, where: str) -> list[Message]:
    """Return the messages of an entry; each tool result of a user becomes a separate message."""
    message = object_of(message, where=where)
    role = entry_of(message, "role", str, where=f"{where}.", default="")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text_parts(content, where=f"{where}.content")}]
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results: list[Message] = []
    for place, block in enumerate(content):
        here = f"{where}.content[{place}]"
        block = object_of(block, where=here)
        kind = block.get("type")
        if kind == "tool_use":
            name, call_id = (entry_of(block, key, str, where=f"{here}.", default="") for key in ("name", "id"))
            calls.append(call_of(call_id, name, arguments_of(block.get("input") or {}, where=f"{here}.input")))
        elif kind == "tool_result":
            result = text_parts(block.get("content"), where=f"{here}.content")
            call_id = entry_of(block, "tool_use_id", str, where=f"{here}.", default="")
            results.append({"role": "tool", "tool_call_id": call_id, "content": result})
        elif kind == "thinking":
            thoughts.append(entry_of(block, "thinking", str, where=f"{here}.", default=""))
        elif kind != "redacted_thinking":
            texts.append(text_parts([block], where=f"{where}.content"))
    if results and not texts:
        return results
    said: dict[str, Json] = {"role": role, "content": "".join(texts)}
    if thoughts:
        said["reasoning_content"] = "".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said]


def write(reply: ModelReply) -> Json:
    """Return the answer as JSON."""
    [answer] = reply.answers
    return {**_head(reply), "content": _blocks(answer), **_stop(answer), "usage": _usage(reply)}


class Stream(ReplyStream):
    """Events of the answer's blocks."""

    def __init__(self, head: ModelReply, request: ModelRequest) -> None:
        super().__init__(head, request)
        self._parts: list[Part] = []  # of the blocks so far

    def begin(self) -> Iterator[Event]:
        """Yield the message without blocks."""
        started = {**_head(self.head), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**started, "usage": {**_usage(self.head), "output_tokens": 0}})

    def delta(self, index: int, part: Part, text: str) -> Iterator[Event]:
        """Yield text, in a new block if the last block belongs to the other part."""
        yield from self._turn_to(part)
        name = _EMPTY[part]["type"]
        yield self._delta({"type": f"{name}_delta", name: text})

    def finish(self, reply: ModelReply) -> Iterator[Event]:
        """Yield the calls, and the end of the message."""
        [answer] = reply.answers
        if not answer.content and not answer.tool_calls:
            yield from self._turn_to("content")
        yield from self._close()
        blocks = _blocks(answer)
        for index, block in enumerate(blocks[len(blocks) - len(answer.tool_calls) :], start=len(self._parts)):
            yield _event("content_block_start", index=index, content_block={**block, "input": {}})
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield _event("content_block_delta", index=index, delta=arguments)
            yield _event("content_block_stop", index=index)
        yield _event("message_delta", delta=_stop(answer), usage=_usage(reply))
        yield _event("message_stop")

    def _turn_to(self, part: Part) -> Iterator[Event]:
        if self._parts[-1:] == [part]:
            return
        yield from self._close()
        self._parts.append(part)
        yield _event("content_block_start", index=len(self._parts) - 1, content_block=_EMPTY[part])

    def _close(self) -> Iterator[Event]:
        if not self._parts:
            return
        if self._parts[-1] == "reasoning":
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        yield _event("content_block_stop", index=len(self._parts) - 1)

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=len(self._parts) - 1, delta=delta)


def _event(name: str, **data: Json) -> Event:
    return name, {"type": name, **data}


def error(refused: RefusedRequest) -> Json:
    """Return the error of a refused request as JSON."""
    kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def _head(reply: ModelReply) -> dict[str, Json]:
    return {"id": f"msg_{reply.reply_id}", "type": "message", "role": "assistant", "model": reply.model}


def _blocks(answer: ModelAnswer) -> list[dict[str, Json]]:
    blocks: list[dict[str, Json]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": _SIGNATURE})
    if answer.content or not answer.tool_calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.tool_calls:
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]})
    return blocks


def _stop(answer: ModelAnswer) -> dict[str, Json]:
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons[answer.finish_reason]
    if answer.stop_string is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_string}


def _usage(reply: ModelReply) -> dict[str, Json]:
    cached = reply.num_cached_tokens
    return {
        "input_tokens": reply.num_prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": reply.num_completion_tokens,
    }
