"""Splitting a completion into reasoning and answer."""

from __future__ import annotations

OPENING, CLOSING = "<think>", "</think>"


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str | None, str]:
    r"""Return the reasoning (None when there is none) and the rest of a completion's text.

    Args:
        text: as sampled.
        is_open: whether the prompt already opened the reasoning, so that the text starts inside it.

    Example:
        >>> split_reasoning("<think>\n1+1\n</think>\n\n2"), split_reasoning("2"), split_reasoning("<think>1+")
        (('1+1', '2'), (None, '2'), ('1+', ''))
    """
    stripped = text.lstrip()
    if stripped.startswith(OPENING):
        text = stripped[len(OPENING) :]
    elif not is_open:
        return None, text
    reasoning, closing, rest = text.partition(CLOSING)
    return reasoning.strip("\n"), rest.lstrip("\n") if closing else ""
