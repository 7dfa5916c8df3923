"""The live view in a notebook: an output of the cell, which each change replaces."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

_WIDTH = 480
_HEIGHT = 80


class NotebookOutput:
    """An output of the running cell that shows HTML."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show HTML in place of the previous HTML."""
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(text), display_id=True)
        else:
            self._handle.update(HTML(text))


def table_html(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return columns, each a title and its cells, as a table.

    Example:
        >>> table_html([("step", ["1", "2"]), ("reward", ["0.5", "<"])]).count("<tr>")
        3
    """
    titles = "".join(f"<th>{html.escape(title)}</th>" for title, _ in columns)
    rows = zip(*(cells for _, cells in columns), strict=True)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def curve_svg(values: Sequence[float]) -> str:
    """Return values as a curve; empty with fewer than two finite values. The axis covers all values, 0 and 1.

    Example:
        >>> 'points="0.0,80.0 480.0,0.0"' in curve_svg([0.0, 1.0])
        True
    """
    finite = [(place, value) for place, value in enumerate(values) if math.isfinite(value)]
    if len(finite) < 2:
        return ""
    low = min(0.0, *(value for _, value in finite))
    high = max(1.0, *(value for _, value in finite))
    points = " ".join(
        f"{_WIDTH * place / (len(values) - 1):.1f},{_HEIGHT * (high - value) / (high - low):.1f}"
        for place, value in finite
    )
    line = f'<polyline points="{points}" fill="none" stroke="teal" stroke-width="2"/>'
    frame = f'<path d="M0 0H{_WIDTH}M0 {_HEIGHT}H{_WIDTH}" stroke="silver"/>'
    svg = f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}">{frame}{line}</svg>'
    return f"<figure><figcaption>mean reward, {low:g} to {high:g}</figcaption>{svg}</figure>"


def paragraph_html(text: str) -> str:
    """Return text as a paragraph that keeps line breaks.

    Example:
        >>> paragraph_html("a < b")
        '<p style="white-space: pre-wrap">a &lt; b</p>'
    """
    return f'<p style="white-space: pre-wrap">{html.escape(text)}</p>'
