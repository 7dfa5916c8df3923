"""Messages: plain dicts in the chat-template convention, and what parsing a completion gives."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import torch

Message: TypeAlias = Mapping[str, Any]
"""One message: `role`, `content` and, where they apply, `reasoning_content`, `tool_calls`, `tool_call_id`, `name`."""

ToolSchema: TypeAlias = Mapping[str, Any]
"""A tool in the JSON-schema form that chat templates read (`{"type": "function", "function": {...}}`)."""

Value = TypeVar("Value")

OPTIONAL_MESSAGE_KEYS = ("reasoning_content", "tool_calls", "tool_call_id", "name")


@dataclass(frozen=True, slots=True)
class MalformedToolCall:
    """A tool call that the model began and that cannot be executed; kept so that the model can be told."""

    raw: str
    """The call's text as sampled."""
    reason: str
    """What is wrong with it, in words that may be shown to the model."""


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """A completion's tokens read as an assistant message; parsing never raises."""

    message: Message
    """The assistant message: content, reasoning content and well-formed tool calls."""
    is_complete: bool
    """Whether the completion ended by itself, with an end-of-turn token (false: cut by length or a stop string)."""
    malformed_tool_calls: tuple[MalformedToolCall, ...] = ()
    """Calls that could not be read, in order."""


def check_messages(messages: object, *, argument: str = "messages") -> tuple[Message, ...]:
    """Validate messages at a boundary and return them as a tuple, lone surrogates in their texts replaced.

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
    r"""Return a text, or the dicts and lists that hold texts, without lone surrogates; the same object if it has none.

    JSON may escape such (`"\\ud800"`), and neither a tokenizer nor a file takes them.

    Example:
        >>> encodable("a\ud800b"), encodable({"a": ["\udfff"]})
        ('a?b', {'a': ['?']})
    """
    return value if _is_encodable(value) else cast(Value, _encodable(value))


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
    """Return a message, a row or a part of one with dicts, lists, sets and arrays of its own, at any depth.

    What crosses a border to other people's code, or comes from there, is copied: they may change it. Texts, numbers and
    objects of other types are handed over as they are.

    Example:
        >>> message = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
        >>> copy = copied(message)
        >>> copy == message, copy["content"][0] is message["content"][0]
        (True, False)
    """
    return cast(Value, _copied(value))


def _copied(value: object) -> object:
    kind = type(value)
    if kind is str or value is None:  # nearly everything that there is
        return value
    if kind is dict:
        return {key: _copied(entry) for key, entry in value.items()}  # type: ignore[attr-defined]
    if kind is list:
        return [_copied(entry) for entry in value]  # type: ignore[attr-defined]
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return copy.deepcopy(value)
    if isinstance(value, tuple):
        entries = [_copied(entry) for entry in value]
        return value._make(entries) if hasattr(value, "_make") else tuple(entries)
    if isinstance(value, (set, bytearray)):  # what is in a set does not change
        return value.copy()
    if isinstance(value, dict | list):  # of a class of its own, which may know more than its entries
        own = copy.copy(value)
        places = list(own) if isinstance(own, dict) else range(len(own))
        for place in places:
            own[place] = _copied(own[place])
        return own
    if isinstance(value, Mapping):
        return {key: _copied(entry) for key, entry in value.items()}
    return value


def text_of(content: object) -> str:
    """Return the text of a message's content: the string itself, or the text parts of a multi-modal list joined.

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
