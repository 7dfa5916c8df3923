"""Preparation of tool results for chat templates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

from llmrl.data import Message, text_of

TOOL_ROLES = ("tool", "observation", "function", "ipython")
"""Roles of messages with a tool's result; each template supports some of them."""


def name_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the `name` of the called function in each tool result.

    The name is taken from the call with the result's id, or, if calls or the result have no ids,
    from the call in the same position. A result that answers no call gets no name.

    Example:
        >>> call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {}}}
        >>> asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        >>> name_results([asked, {"role": "tool", "tool_call_id": "1", "content": "3"}])[1]["name"]
        'add'
    """
    named: list[Message] = []
    calls: list[Message] = []
    place = 0
    for message in messages:
        if message["role"] == "assistant":
            calls = list(message.get("tool_calls") or ())
            place = 0
        elif message["role"] in TOOL_ROLES:
            call = _call_of(message, calls, place)
            place += 1
            if call is not None and not message.get("name"):
                message = {**message, "name": call["function"]["name"]}
        named.append(message)
    return named


def _call_of(result: Message, calls: Sequence[Message], place: int) -> Message | None:
    call_id = result.get("tool_call_id")
    if call_id is not None and any(call.get("id") is not None for call in calls):
        return next((call for call in calls if call.get("id") == call_id), None)
    return calls[place] if place < len(calls) else None


def carry_results(messages: Iterable[Message], *, carry_all: bool, carry_orphans: bool) -> list[Message]:
    """Return the messages with tool results as user messages, each between `<tool_response>` tags.

    Consecutive results and a user message after them are merged, since many templates require alternating roles.
    `carry_all` converts all results, `carry_orphans` those after an answer without calls, or without name and id.
    """
    written: list[Message] = []
    has_calls = is_open = False
    for message in messages:
        role = message["role"]
        content: object = message.get("content")
        if role == "assistant":
            has_calls = bool(message.get("tool_calls"))
        is_result = role in TOOL_ROLES
        is_orphan = not has_calls or not (message.get("name") or message.get("tool_call_id"))
        is_carried = is_result and (carry_all or (carry_orphans and is_orphan))
        if is_carried:
            content = with_text(content, before="<tool_response>\n", after="\n</tool_response>")
        if is_open and (is_carried or role == "user"):
            written[-1] = {**written[-1], "content": _joined(written[-1]["content"], content)}
        elif is_carried:
            written.append({"role": "user", "content": content})
        else:
            written.append(message)
        is_open = is_carried
    return written


def _joined(first: object, second: object) -> object:
    """Return two contents as one, on separate lines; as a list of parts if one has a part that is not text."""
    if not _are_parts(first):
        return with_text(second, before=f"{first}\n")
    following = with_text(second, before="\n")
    if _are_parts(following):
        return [*first, *following]
    return with_text(first, after=str(following))


def _are_parts(content: object) -> TypeGuard[Sequence[object]]:
    return isinstance(content, Sequence) and not isinstance(content, str)


def with_text(content: object, *, before: str = "", after: str = "") -> object:
    """Return a message's content with text around it; as a list of parts only if a part is not text, such as an image.

    Example:
        >>> with_text([{"type": "text", "text": "a"}], after="b")
        'ab'
    """
    parts = content if _are_parts(content) else ()
    if all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        return f"{before}{text_of(content)}{after}"
    return [*text_parts(before), *parts, *text_parts(after)]


def text_parts(text: object, *, kind: str = "text") -> list[dict[str, object]]:
    """Return a text as parts of a content: one part of this type, or none if there is no text."""
    return [{"type": kind, "text": text}] if text else []
