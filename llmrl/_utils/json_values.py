"""Conversion of arbitrary values to JSON."""

from __future__ import annotations

from collections.abc import Mapping

from llmrl._utils.types import JSON

# Python cannot write, or cannot read back, deeper values and longer integers.
_MAX_DEPTH = 100
_MAX_BITS = 14_000


def as_json(value: object, depth: int = _MAX_DEPTH) -> JSON:
    """Return a value as JSON, with the text of objects that JSON does not support. Never raises.

    Values nested more than 100 deep become `…`. Lone surrogates are kept: write the text with
    `errors="backslashreplace"`.

    Example:
        >>> as_json({"a": (1, {2}), 3: None})
        {'a': [1, '{2}'], '3': None}
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else hex(value)
    try:
        if isinstance(value, Mapping | list | tuple) and not depth:
            return "…"
        if isinstance(value, Mapping):
            return {str(key): as_json(entry, depth - 1) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [as_json(entry, depth - 1) for entry in value]
        return str(value)
    except Exception:  # a user's class
        return f"<{type(value).__name__}>"
