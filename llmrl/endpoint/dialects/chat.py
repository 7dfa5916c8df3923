"""OpenAI's chat completions API (https://platform.openai.com/docs/api-reference/chat)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from llmrl.data import Message
from llmrl.endpoint.dialects.reading import (
    OTHER_ROLES,
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

_READ = (
    "logprobs", "max_completion_tokens", "max_tokens", "messages", "model", "n", "response_format", "stop", "stream",
    "tools", "train",
)  # fmt: skip
_MAX_ANSWERS = 128
_CHUNK = "chat.completion.chunk"
_DELTAS: dict[Part, str] = {"reasoning": "reasoning_content", "content": "content"}


def read(body: Body) -> ModelRequest:
    """Read a request. Raises RefusedRequest if it is malformed or unsupported.

    Example:
        >>> read({"model": "policy", "messages": [{"role": "user", "content": "Hi"}], "n": 2}).num_answers
        2
    """
    messages = entry_of(body, "messages", list, default=[])
    refuse_other_tools(body, "function")
    described = [object_of(tool.get("function"), where="tools[].function") for tool in tools_of(body, "function")]
    tools = tuple(function_of(tool, "parameters", where="tools[].function.") for tool in described)
    wanted = entry_of(body, "response_format", dict, default={})
    num_answers = positive(entry_of(body, "n", int, default=1), "n")
    if num_answers is None or num_answers > _MAX_ANSWERS:
        raise RefusedRequest(f"n must be at most {_MAX_ANSWERS}, got {num_answers}.")
    longest = entry_of(body, "max_completion_tokens", int, default=entry_of(body, "max_tokens", int))
    stream_options = entry_of(body, "stream_options", dict, default={})
    return ModelRequest(
        messages=checked(_message(message, f"messages[{place}]") for place, message in enumerate(messages)),
        model=entry_of(body, "model", str, default=""),
        tools=tools,
        max_tokens=positive(longest, "max_tokens"),
        stop=stops_of(body.get("stop"), "stop"),
        num_answers=num_answers,
        is_streamed=entry_of(body, "stream", bool, default=False),
        may_call=body.get("tool_choice") != "none",
        form=form_of(body, wanted, "response_format", tools),
        wants_log_probs=entry_of(body, "logprobs", bool, default=False),
        is_usage_streamed=bool(stream_options.get("include_usage")),
        is_trained=entry_of(body, "train", bool, default=True),
        sampling=sampling_of(body),
        overridden=overridden(body, *_READ, tools=described),
    )


def _message(message: Json, where: str) -> Message:
    message = object_of(message, where=where)
    role = entry_of(message, "role", str, where=f"{where}.", default="")
    read_message: dict[str, Json] = {
        "role": OTHER_ROLES.get(role, role),
        "content": text_parts(message.get("content"), where=f"{where}.content", kinds=("text", "refusal")),
    }
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None and read_message["role"] == "tool":
            read_message[name] = entry_of(message, name, str, where=f"{where}.")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        read_message["reasoning_content"] = reasoning
    calls = entry_of(message, "tool_calls", list, where=f"{where}.", default=[])
    if calls:
        read_message["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return read_message


def _call(call: Json, where: str) -> ToolCall:
    call = object_of(call, where=where)
    function = object_of(call.get("function"), where=f"{where}.function")
    name = entry_of(function, "name", str, where=f"{where}.function.", default="")
    call_id = entry_of(call, "id", str, where=f"{where}.", default="")
    return call_of(call_id, name, arguments_of(function.get("arguments"), where=f"{where}.function.arguments"))


def write(reply: ModelReply) -> Json:
    """Return the answers as JSON."""
    choices = [
        {
            "index": index,
            "message": _message_of(answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _log_probs(answer),
        }
        for index, answer in enumerate(reply.answers)
    ]
    return {**_head(reply, "chat.completion"), "choices": choices, "usage": _usage(reply)}


class Stream(ReplyStream):
    """Chunks of the answers."""

    def begin(self) -> Iterator[Event]:
        """Yield the first chunk of each answer."""
        for index in range(self.request.num_answers):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, part: Part, text: str) -> Iterator[Event]:
        """Yield a chunk with text."""
        yield self._chunk(index, {_DELTAS[part]: text})

    def finish(self, reply: ModelReply) -> Iterator[Event]:
        """Yield the chunks with calls, and the last of each answer, which has all log-probs."""
        for index, answer in enumerate(reply.answers):
            for place, call in enumerate(_calls(answer)):
                yield self._chunk(index, {"tool_calls": [{"index": place, **call}]})
            yield self._chunk(index, {}, answer.finish_reason, _log_probs(answer))
        if self.request.is_usage_streamed:
            yield None, {**_head(reply, _CHUNK), "choices": [], "usage": _usage(reply)}
        yield None, "[DONE]"

    def _chunk(self, index: int, delta: Json, finish_reason: str | None = None, log_probs: Json = None) -> Event:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": log_probs}
        return None, {**_head(self.head, _CHUNK), "choices": [choice]}


def error(refused: RefusedRequest) -> Json:
    """Return the error of a refused request as JSON."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": refused.message, "type": kind, "param": None, "code": refused.code}}


def _head(reply: ModelReply, kind: str) -> dict[str, Json]:
    return {"id": f"chatcmpl-{reply.reply_id}", "object": kind, "created": reply.created_s, "model": reply.model}


def _message_of(answer: ModelAnswer) -> dict[str, Json]:
    message: dict[str, Json] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = _calls(answer)
    return message


def _calls(answer: ModelAnswer) -> list[Json]:
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])},
        }
        for call in answer.tool_calls
    ]


def _log_probs(answer: ModelAnswer) -> Json:
    if not answer.token_texts:
        return None
    tokens = zip(answer.token_texts, answer.log_probs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in tokens
        ]
    }


def _usage(reply: ModelReply) -> Json:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_completion_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
    }
