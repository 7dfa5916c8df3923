"""Results of tools, as text for the model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from llmrl._utils.arguments import check_choice, check_least

_ADDRESS = re.compile(r" at 0x[0-9a-f]+[^<>]*>")
TruncateSide = Literal["start", "middle", "end"]


def truncate(text: str, max_chars: int, side: TruncateSide = "middle") -> str:
    r"""Return the text, shortened if necessary, with a mark where characters were removed.

    Raises ValueError if the side is unknown or the limit is below 1.

    Example:
        >>> truncate("abcdefghij", 4, "end"), truncate("abcdefghij", 4, "middle")
        ('abcd\n[… 6 characters left out …]', 'ab\n[… 6 characters left out …]\nij')
    """
    check_choice(get_args(TruncateSide), side=side)
    check_least(1, max_chars=max_chars)
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
    """Text in a tool's result."""

    text: str


@dataclass(frozen=True, slots=True)
class JsonPart:
    """JSON in a tool's result."""

    data: object


@dataclass(frozen=True, slots=True)
class FileRefPart:
    """Path of a file in a tool's result."""

    path: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a tool's result. No policy of llmrl reads images: the call counts as failed."""

    data: bytes
    media_type: str = "image/png"


ToolResultPart: TypeAlias = TextPart | JsonPart | FileRefPart | ImagePart


@dataclass(frozen=True, slots=True)
class ToolResult:
    r"""A tool's result in parts, with a flag for failure.

    Example:
        >>> ToolResult((TextPart("found:"), JsonPart({"count": 2}))).text
        'found:\n{"count": 2}'
    """

    parts: tuple[ToolResultPart, ...] = ()
    is_error: bool = False
    """Whether the call counts as failed."""
    meta: Mapping[str, object] = field(default_factory=dict)
    """Data for other code that calls the tool; the model does not see it."""

    @classmethod
    def from_text(cls, text: str, *, is_error: bool = False) -> ToolResult:
        """Return a result with one text."""
        return cls((TextPart(text),), is_error)

    @property
    def text(self) -> str:
        """Text for the model. Raises TypeError if there is an image."""
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
            raise TypeError(
                f"the tool returned an image ({media_type}, {len(data)} bytes), but the model reads only text"
            )


def as_text(value: object) -> str:
    """Return a value as text: strings and results as they are, None as "", others as JSON or `str`.

    Raises TypeError if the text contains a memory address.

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
            f"the tool returned {text:.100}, which a model cannot read; a tool must return text, numbers, lists or "
            "dicts"
        )
    return text
