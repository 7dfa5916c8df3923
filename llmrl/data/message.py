"""Messages as plain dicts in the chat-template convention, and the result of parsing a completion."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch

Message: TypeAlias = Mapping[str, Any]
"""One message: `role`, `content`, and optionally `reasoning_content`, `tool_calls`, `tool_call_id` and `name`."""

ToolSchema: TypeAlias = Mapping[str, Any]
"""A tool in the JSON-schema form that chat templates read (`{"type": "function", "function": {...}}`)."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """A tool call of the model that cannot be executed; it is kept so that the model can be informed of the reason."""

    raw: str
    """The call's text as sampled."""
    reason: str
    """What is wrong with the call, in a form that may be shown to the model."""


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion parsed as an assistant message; parsing never raises."""

    message: Message
    """The assistant's message: content, reasoning content and well-formed tool calls."""
    is_complete: bool
    """Whether the completion ended with an end-of-turn token, not by its length or a stop string."""
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()
    """Calls that could not be parsed, in order."""


def check_messages(messages: object, *, argument: str = "messages") -> tuple[Message, ...]:
    """Validate messages and return them as a tuple, with lone surrogates in their texts replaced.

    Raises:
        TypeError: if an entry is not a mapping.
        ValueError: if an entry lacks `role`, or has neither content nor tool calls.

    Example:
        >>> check_messages([{"role": "user", "content": "Hi"}])
        ({'role': 'user', 'content': 'Hi'},)
    """
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"{argument} must be a sequence of messages, got {type(messages).__name__} ({messages!r:.80}); "
            "wrap a single message in a list."
        )
    checked = tuple(messages)
    for index, message in enumerate(checked):
        if not isinstance(message, Mapping):
            raise TypeError(f"{argument}[{index}] must be a dict with 'role' and 'content', got {message!r}.")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{argument}[{index}] has no 'role' (a string), got keys {sorted(message)}.")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{argument}[{index}] (role {message['role']!r}) has neither 'content' nor 'tool_calls'.")
    return tuple(map(encodable, checked))


def encodable(value: Value) -> Value:
    r"""Replace lone surrogates in a text, or in the texts of dicts and lists; return the same object if there are none.

    JSON may contain them as escapes (`"\\ud800"`), but tokenizers and files reject them.

    Example:
        >>> encodable("a\ud800b"), encodable({"a": ["\udfff"]})
        ('a?b', {'a': ['?']})
    """
    if _is_encodable(value):
        return value
    return cast(Value, _encodable(value))


def _is_encodable(value: object) -> bool:
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return False
        return True
    if isinstance(value, Mapping):
        return all(map(_is_encodable, value)) and all(map(_is_encodable, value.values()))
    return not isinstance(value, (list, tuple)) or all(map(_is_encodable, value))


def _encodable(value: object) -> object:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [encodable(entry) for entry in value]
    return value


def copied(value: Value) -> Value:
    """Return a message, a row or a part of one with its own dicts, lists, sets and arrays, at any depth.

    The copy protects data against changes by code that receives or provides it. Texts, numbers and
    objects of other types are not copied.

    Example:
        >>> message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
        >>> copy = copied(message)
        >>> copy == message, copy["content"][0] is message["content"][0]
        (True, False)
    """
    return cast(Value, _copied(value))


def _copied(value: object) -> object:
    kind = type(value)
    if kind is str or value is None:  # the most frequent cases
        return value
    if kind is dict:
        return {key: _copied(entry) for key, entry in value.items()}  # type: ignore[attr-defined]
    if kind is list:
        return [_copied(entry) for entry in value]  # type: ignore[attr-defined]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return copy.deepcopy(value)
    if isinstance(value, tuple):
        entries = [_copied(entry) for entry in value]
        if hasattr(value, "_make"):
            return value._make(entries)
        return tuple(entries)
    if isinstance(value, (set, bytearray)):  # the items of a set are immutable
        return value.copy()
    if isinstance(value, dict | list):  # a subclass, which may have more state than its entries
        own = copy.copy(value)
        places = list(own) if isinstance(own, dict) else range(len(own))
        for place in places:
            own[place] = _copied(own[place])
        return own
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return value


def prompt_of(messages: Iterable[Message]) -> list[Message]:
    """Return the messages before the first answer.

    Example:
        >>> prompt_of([{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}])
        [{'role': 'user', 'content': '1 + 1 ='}]
    """
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def system_messages(prompt: str | None) -> list[Message]:
    """Return the message with a system prompt, or nothing if there is none."""
    return [] if prompt is None else [{"role": "system", "content": prompt}]


def text_of(content: object) -> str:
    """Return the text of a message's content: the string, or the joined text parts of a multi-modal list.

    Example:
        >>> text_of([{"type": "text", "text": "a"}, {"type": "image", "url": "x"}, {"type": "text", "text": "b"}])
        'ab'
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return str(content)
