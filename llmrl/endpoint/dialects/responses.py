"""OpenAI's responses API, as agents use it (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from llmrl.data.message import Message, system_messages
from llmrl.endpoint.dialects.reading import (
    TEXTS,
    Body,
    arguments_of,
    call_of,
    checked,
    entry_of,
    form_of,
    function_of,
    object_of,
    other_tools,
    overridden,
    positive,
    sampling_of,
    text_parts,
    tools_of,
)
from llmrl.endpoint.dialects.stream import Event, Part, ReplyStream
from llmrl.endpoint.requests import REFERENCES, ModelAnswer, ModelReply, ModelRequest, RefusedRequest
from llmrl.rendering.tool_calls import Json

_READ = (
    "background", "conversation", "input", "instructions", "max_output_tokens", "model", "previous_response_id",
    "stream", "text", "tools", "train",
)  # fmt: skip
_ID = "resp_"
_KINDS: dict[Part, str] = {"reasoning": "reasoning_text", "content": "output_text"}
_LOG_PROBS: dict[Part, dict[str, Json]] = {"reasoning": {}, "content": {"logprobs": []}}


def read(body: Body) -> ModelRequest:
    """Read a request. Raises RefusedRequest if it is malformed or unsupported.

    Example:
        >>> read({"model": "policy", "instructions": "Be brief.", "input": "Hi"}).num_instructions
        1
    """
    text = entry_of(body, "text", dict, default={})
    wanted = entry_of(text, "format", dict, default={})
    # Clients send OpenAI's hosted tools with every request but do not need them: they are ignored.
    described = tools_of(body, "function")
    tools = tuple(function_of(tool, "parameters", where="tools[].") for tool in described)
    if body.get("background") or body.get("conversation") is not None:
        raise RefusedRequest("background and conversation are not supported; send the input, or previous_response_id.")
    opening = system_messages(entry_of(body, "instructions", str) or None)
    previous = entry_of(body, "previous_response_id", str)
    return ModelRequest(
        messages=checked([*opening, *messages_of(body.get("input"))]),
        model=entry_of(body, "model", str, default=""),
        tools=tools,
        max_tokens=positive(entry_of(body, "max_output_tokens", int), "max_output_tokens"),
        is_streamed=entry_of(body, "stream", bool, default=False),
        may_call=body.get("tool_choice") != "none",
        form=form_of(body, wanted, "text.format", tools),
        previous_id=None if previous is None else previous.removeprefix(_ID),
        num_instructions=len(opening),
        is_trained=entry_of(body, "train", bool, default=True),
        sampling=sampling_of(body),
        overridden=(
            *(f"text.{name:.80}" for name in text if name != "format"),
            *(f"tools.{kind}" for kind in other_tools(body, "function")),
            *overridden(body, *_READ, tools=described),
        ),
    )


def messages_of(items: Json) -> list[Message]:
    """Return the messages of items; those of one answer (reasoning, text, calls) make one message.

    Raises RefusedRequest if an item is malformed or its type is not supported.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise RefusedRequest(f"input must be a string or a list of items, got {items!r:.80}.")
    messages: list[dict[str, Json]] = []
    is_answer_open = False

    def answer() -> dict[str, Json]:
        nonlocal is_answer_open
        if not is_answer_open:
            messages.append({"role": "assistant", "content": ""})
            is_answer_open = True
        return messages[-1]

    for place, item in enumerate(items):
        where = f"input[{place}]"
        item = object_of(item, where=where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts = item.get("content") or item.get("summary")
            text = text_parts(thoughts, where=f"{where}.content", kinds=TEXTS)
            if text:
                answer()["reasoning_content"] = answer().get("reasoning_content", "") + text
        elif kind == "function_call":
            name, call_id = (entry_of(item, key, str, where=f"{where}.", default="") for key in ("name", "call_id"))
            arguments = arguments_of(item.get("arguments"), where=f"{where}.arguments")
            answer().setdefault("tool_calls", []).append(call_of(call_id, name, arguments))
        elif kind == "function_call_output":
            call_id = entry_of(item, "call_id", str, where=f"{where}.", default="")
            output = text_parts(item.get("output"), where=f"{where}.output", kinds=TEXTS)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            is_answer_open = False
        elif kind == "item_reference":
            answer().setdefault(REFERENCES, []).append(entry_of(item, "id", str, where=f"{where}.", default=""))
        elif kind == "message":
            role = entry_of(item, "role", str, where=f"{where}.", default="")
            content = text_parts(item.get("content"), where=f"{where}.content", kinds=TEXTS)
            if role == "assistant":
                answer()["content"] += content
            else:
                messages.append({"role": {"developer": "system"}.get(role, role), "content": content})
                is_answer_open = False
        else:
            raise RefusedRequest(f"{where} is of type {kind!r:.80}, which is not supported here.")
    return list(messages)


def write(reply: ModelReply) -> Json:
    """Return the answer as JSON."""
    [answer] = reply.answers
    return {**_head(reply), **_ending(answer), "output": _items(reply), "usage": _usage(reply)}


class Stream(ReplyStream):
    """Events of the answer's items."""

    def __init__(self, head: ModelReply, request: ModelRequest) -> None:
        super().__init__(head, request)
        self._numbers = itertools.count()
        self._parts: list[Part] = []  # of the items so far
        self._text = ""  # of the last item

    def begin(self) -> Iterator[Event]:
        """Yield the response without items."""
        started = {**_head(self.head), "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)

    def delta(self, index: int, part: Part, text: str) -> Iterator[Event]:
        """Yield text, in a new item if the last item belongs to the other part."""
        yield from self._turn_to(part)
        self._text += text
        yield self._event(f"response.{_KINDS[part]}.delta", **self._place, delta=text, **_LOG_PROBS[part])

    def finish(self, reply: ModelReply) -> Iterator[Event]:
        """Yield the calls, and the whole response."""
        [answer] = reply.answers
        if not answer.content and not answer.tool_calls:
            yield from self._turn_to("content")
        yield from self._close()
        items = _items(reply)
        for index, item in enumerate(items[len(items) - len(answer.tool_calls) :], start=len(self._parts)):
            place = {"item_id": item["id"], "output_index": index}
            added = {**item, "status": "in_progress", "arguments": ""}
            yield self._event("response.output_item.added", output_index=index, item=added)
            yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=index, item=item)
        response = write(reply)
        yield self._event(f"response.{response['status']}", response=response)

    def _turn_to(self, part: Part) -> Iterator[Event]:
        if self._parts[-1:] == [part]:
            return
        yield from self._close()
        self._parts.append(part)
        self._text = ""
        item = {**_item(self.head, part, ""), "status": "in_progress", "content": []}
        yield self._event("response.output_item.added", output_index=len(self._parts) - 1, item=item)
        [content] = _item(self.head, part, "")["content"]
        yield self._event("response.content_part.added", **self._place, part=content)

    def _close(self) -> Iterator[Event]:
        if not self._parts:
            return
        part = self._parts[-1]
        item = _item(self.head, part, self._text)
        yield self._event(f"response.{_KINDS[part]}.done", **self._place, text=self._text, **_LOG_PROBS[part])
        yield self._event("response.content_part.done", **self._place, part=item["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._parts) - 1, item=item)

    @property
    def _place(self) -> dict[str, Json]:
        item_id = _item(self.head, self._parts[-1], "")["id"]
        return {"item_id": item_id, "output_index": len(self._parts) - 1, "content_index": 0}

    def _event(self, kind: str, /, **data: Json) -> Event:
        return kind, {"type": kind, "sequence_number": next(self._numbers), **data}


def _head(reply: ModelReply) -> dict[str, Json]:
    return {
        "id": f"{_ID}{reply.reply_id}",
        "object": "response",
        "created_at": reply.created_s,
        "model": reply.model,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _ending(answer: ModelAnswer) -> dict[str, Json]:
    if answer.finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed"}


def _items(reply: ModelReply) -> list[dict[str, Json]]:
    [answer] = reply.answers
    items: list[dict[str, Json]] = []
    if answer.reasoning:
        items.append(_item(reply, "reasoning", answer.reasoning))
    if answer.content or not answer.tool_calls:
        items.append(_item(reply, "content", answer.content))
    for call in answer.tool_calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
                "status": "completed",
            }
        )
    return items


def _item(reply: ModelReply, part: Part, text: str) -> dict[str, Json]:
    if part == "reasoning":
        thoughts = [{"type": "reasoning_text", "text": text}]
        return {"type": "reasoning", "id": f"rs_{reply.reply_id}", "summary": [], "content": thoughts}
    content = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": f"msg_{reply.reply_id}", "role": "assistant"}
    return {**message, "status": "completed", "content": [content]}


def _usage(reply: ModelReply) -> Json:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
    }
