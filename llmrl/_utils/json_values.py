"""Values of models, environments and users as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping

from llmrl._utils.types import JSON

# Deeper values, and longer integers, raise where Python writes them or reads them back.
_MAX_DEPTH = 100
_MAX_BITS = 14_000


def as_json(value: object, depth: int = _MAX_DEPTH) -> JSON:
    """Return a value as JSON has it, and as its text where JSON has no such thing. Raises for nothing.

    What is nested more than a hundred deep is left out (`…`). Text stays as it is, lone surrogates too: write it with
    `errors="backslashreplace"`, which is how JSON escapes them.

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
