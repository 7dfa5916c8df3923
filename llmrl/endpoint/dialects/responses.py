"""The part of OpenAI's responses that agents use (https://platform.openai.com/docs/api-reference/responses)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from llmrl.data import Message
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
from llmrl.endpoint.requests import REFERENCES, ModelAnswer, ModelReply, ModelRequest, RefusedRequest
from llmrl.rendering.tool_calls import Json

_READ = (
    "background", "conversation", "input", "instructions", "max_output_tokens", "model", "previous_response_id",
    "stream", "text", "tools", "train",
)  # fmt: skip
_ID = "resp_"


def read(body: Body) -> ModelRequest:
    """Read a request. Raises RefusedRequest if it is malformed or unsupported.

    Example:
        >>> read({"model": "policy", "instructions": "Be brief.", "input": "Hi"}).num_instructions
        1
    """
    text = entry_of(body, "text", dict, default={})
    wanted = entry_of(text, "format", dict, default={})
    # Clients send tools of OpenAI's servers with every request, and can do without.
    described = tools_of(body, "function")
    tools = tuple(function_of(tool, "parameters", where="tools[].") for tool in described)
    if body.get("background") or body.get("conversation") is not None:
        raise RefusedRequest("background and conversation are not supported; send the input, or previous_response_id.")
    instructions = entry_of(body, "instructions", str, default="")
    opening: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
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
    """Return the messages of input and output items; the items of one answer (reasoning, text, calls) make one.

    Raises RefusedRequest if an item is malformed or is not read here.
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
                messages.append({"role": "system" if role == "developer" else role, "content": content})
                is_answer_open = False
        else:
            raise RefusedRequest(f"{where} is of type {kind!r:.80}, which is not read here.")
    return list(messages)


def write(reply: ModelReply) -> Json:
    """Return the answer as JSON."""
    [answer] = reply.answers
    return {**_head(reply), **_ending(answer), "output": _items(reply), "usage": _usage(reply)}


def events(reply: ModelReply, request: ModelRequest) -> Iterator[tuple[str | None, Json]]:
    """Yield the events of a stream: name and data."""
    numbers = itertools.count()

    def event(kind: str, /, **data: Json) -> tuple[str, Json]:
        return kind, {"type": kind, "sequence_number": next(numbers), **data}

    started = {**_head(reply), "status": "in_progress", "output": [], "usage": None}
    yield event("response.created", response=started)
    yield event("response.in_progress", response=started)
    for index, item in enumerate(_items(reply)):
        place = {"item_id": item["id"], "output_index": index}
        empty = {**item, "status": "in_progress"}
        if item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item={**empty, "arguments": ""})
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        else:
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            [part] = item["content"]
            place = {**place, "content_index": 0}
            more: dict[str, Json] = {"logprobs": []} if kind == "output_text" else {}
            yield event("response.output_item.added", output_index=index, item={**empty, "content": []})
            yield event("response.content_part.added", **place, part={**part, "text": ""})
            yield event(f"response.{kind}.delta", **place, delta=part["text"], **more)
            yield event(f"response.{kind}.done", **place, text=part["text"], **more)
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=index, item=item)
    response = write(reply)
    yield event(f"response.{response['status']}", response=response)


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
        thoughts = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{reply.reply_id}", "summary": [], "content": thoughts})
    if answer.content or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{reply.reply_id}", "role": "assistant"}
        items.append({**message, "status": "completed", "content": [part]})
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


def _usage(reply: ModelReply) -> Json:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
    }
