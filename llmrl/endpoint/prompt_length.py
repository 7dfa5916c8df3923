"""Lengths of prompts before they are tokenized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from llmrl.rendering.tool_calls import Json

_SAMPLE_CHARACTERS = 1 << 16
_NUM_PIECES = 64


def num_characters(value: Json) -> int:
    """Return the number of characters of messages or schemas, including their keys.

    Example:
        >>> num_characters([{"role": "user", "content": "Hi"}])
        17
    """
    return sum(map(len, texts_of(value)))


def texts_of(value: Json) -> Iterator[str]:
    """Yield the texts of messages or schemas, including their keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield key
            yield from texts_of(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from texts_of(entry)
    else:
        yield str(value)


def sample_of(text: str) -> str:
    """Return evenly spaced pieces of a text, with at most about 65,000 characters in total."""
    size = _SAMPLE_CHARACTERS // _NUM_PIECES
    step = max(size, len(text) // _NUM_PIECES)
    return "".join(text[start : start + size] for start in range(0, len(text), step))
