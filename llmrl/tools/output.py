"""What a tool gives, as text for the model."""

from __future__ import annotations

import json
import re
from typing import Literal, get_args

_ADDRESS = re.compile(r" at 0x[0-9a-f]+[^<>]*>")
TruncateSide = Literal["start", "middle", "end"]


def truncate(text: str, max_chars: int, side: TruncateSide = "middle") -> str:
    r"""Return the text, or what fits of it with a mark where the rest was: at its start, in its middle, or at its end.

    Raises:
        ValueError: for an unknown side, or a limit below one.

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


def as_text(value: object) -> str:
    """Return text as it is, nothing as nothing, anything else as JSON, or else as Python prints it.

    Raises:
        TypeError: for an object, or one within, that Python prints as its place in memory.

    Example:
        >>> as_text({"celsius": 9}), as_text(None), as_text({1, 1})
        ('{"celsius": 9}', '', '{1}')
    """
    if isinstance(value, str):
        return value
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
