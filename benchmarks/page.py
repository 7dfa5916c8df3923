"""The performance page: a section for each benchmark, replaced when it has run again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
INTRODUCTION = """\
# Performance

Every number here is a ratio, ours beside a peer's or the bare engine's, measured in one run on two CPU cores without a
GPU. Repeat one with the command in its heading; `python -m benchmarks list` names all, and `--page` writes what was
measured into this page. These machines are noisy: read a tenth as nothing.
"""


def section(result: Mapping[str, Any], explanation: str) -> str:
    """What a benchmark measures, what came out, and its medians as a table."""
    verdict = "met" if result["met"] else "not met"
    lines = [
        f"## `python -m benchmarks {result['name']}`",
        "",
        explanation,
        "",
        f"**{result['ratio']:.3g}**: {result['ratio_of']}. Goal {result['goal']:.3g}, {verdict}.",
        "",
        "| measured | median |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {value} |" for name, value in _cells(result["medians"])),
    ]
    return "\n".join(lines) + "\n"


def updated(page: str, new: str) -> str:
    """The page with a section in place of the one with the same heading, or at its end."""
    _, *sections = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    by_heading = {text.partition("\n")[0]: text.strip() for text in [*sections, new]}
    return "\n\n".join([INTRODUCTION.strip(), *by_heading.values()]) + "\n"


def _cells(medians: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for name, value in medians.items():
        name = f"{above}, {name}" if above else str(name)
        if isinstance(value, Mapping):
            yield from _cells(value, name)
        elif isinstance(value, float):
            yield name, f"{value:.4g}"
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value)) or "none"
        else:
            yield name, str(value)
