"""What a tool gives, as text for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

_ADDRESS = re.compile(r" at 0x[0-9a-f]+[^<>]*>")
TruncateSide = Literal["start", "middle", "end"]


def truncate(text: str, max_chars: int, side: TruncateSide = "middle") -> str:
    r"""Return the text, or what fits of it with a mark where the rest was: at its start, in its middle, or at its end.

    Raises:
        ValueError: if the side is unknown or the limit below one.

    Example:
        >>> truncate("abcdefghij", 4, "end"), truncate("abcdefghij", 4, "middle")
        ('abcd\n[… 6 characters left out …]', 'ab\n[… 6 characters left out …]\nij')
    """
    if side not in get_args(TruncateSide):
        raise ValueError(f"side must be one of {get_args(TruncateSide)}, got {side!r}.")
    if max_chars < 1:
        raise ValueError(f"max_chars must be at least 1, got {max_chars}.")
    if len(text) <= max_chars:
        return text
    mark = f"[… {len(text) - max_chars} characters left out …]"
    if side == "end":
        return f"{text[:max_chars]}\n{mark}"
    if side == "start":
        return f"{mark}\n{text[-max_chars:]}"
    num_head = (max_chars + 1) // 2
    return f"{text[:num_head]}\n{mark}\n{text[len(text) - (max_chars - num_head) :]}"


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text of a tool's result."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonPart:
    """Something of a tool's result that is given as JSON."""

    data: object


@dataclass(frozen=True, slots=True)
class FileRefPart:
    """A file that a tool made, given to the model by its path."""

    path: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image of a tool's result, which no policy here sees: a call that gives one has failed, and says so."""

    data: bytes
    media_type: str = "image/png"


ToolResultPart: TypeAlias = TextPart | JsonPart | FileRefPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolResult:
    r"""What a tool gives, in parts, where a text or a value does not say whether it worked.

    Example:
        >>> ToolResult((TextPart("found:"), JsonPart({"count": 2}))).text
        'found:\n{"count": 2}'
    """

    parts: tuple[ToolResultPart, ...] = ()
    is_error: bool = False
    """The call counts as failed."""
    meta: Mapping[str, object] = field(default_factory=dict)
    """For callers of the tool by hand."""

    @classmethod
    def from_text(cls, text: str, *, is_error: bool = False) -> ToolResult:
        """Return a result of one text."""
        return cls((TextPart(text),), is_error)

    @property
    def text(self) -> str:
        """What the model reads; TypeError if it is an image."""
        return "\n".join(map(_text_of_part, self.parts))


def _text_of_part(part: ToolResultPart) -> str:
    match part:
        case TextPart(text):
            return text
        case JsonPart(data):
            return as_text(data)
        case FileRefPart(path):
            return f"<file:{path}>"
        case ImagePart(data, media_type):
            raise TypeError(f"the tool gave an image ({media_type}, {len(data)} bytes), and the model reads text alone")


def as_text(value: object) -> str:
    """Return text as it is, nothing as nothing, a result's parts, anything else as JSON, or else as Python prints it.

    Raises:
        TypeError: if it is, or contains, an object that Python prints as its place in memory.

    Example:
        >>> as_text({"celsius": 9}), as_text(None), as_text({1, 1})
        ('{"celsius": 9}', '', '{1}')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, ToolResult):
        return value.text
    if value is None:
        return ""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    if _ADDRESS.search(text):
        raise TypeError(
            f"the tool gave {text:.100}, which says nothing to a model; a tool returns text, numbers, lists or dicts"
        )
    return text
