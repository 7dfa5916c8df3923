"""The performance page, with a section for each benchmark, which a new run replaces."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
INTRODUCTION = """\
# Performance

Every number here is a ratio of llmrl to a peer or to the bare engine, measured in one run on two CPU cores without a
GPU. Repeat a benchmark with the command in its heading; `python -m benchmarks list` lists all benchmarks, and `--page`
writes the results into this page. These machines are noisy: ignore differences of a tenth.
"""


def section(result: Mapping[str, Any], explanation: str) -> str:
    """Return a benchmark's section: the explanation, the result, and the medians as a table."""
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
    """Return the page with a section that replaces the one with the same heading, or is appended."""
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
