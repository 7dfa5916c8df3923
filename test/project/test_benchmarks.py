"""The benchmarks' list and the page that they write; what they measure is never a test."""

from __future__ import annotations

import re

from benchmarks.__main__ import found
from benchmarks.page import INTRODUCTION, PAGE, section, updated

RESULT = {"name": "copy", "ratio": 0.51234, "ratio_of": "ours / theirs", "goal": 0.9, "met": True}


def test_every_benchmark_is_listed_with_its_line():
    first_lines = {name: text.partition("\n")[0] for name, text in found().items()}
    assert {"demo_speed", "import_time"} <= set(first_lines) and "virtual_time" not in first_lines
    assert all(line.endswith(".") and len(line) < 120 for line in first_lines.values())


def test_a_section_has_what_is_measured_what_came_out_and_every_median():
    text = section({**RESULT, "medians": {"seconds": {"ours": 1.0, "their_own": 2.34567}, "lost": []}}, "Copies.")
    assert text.startswith("## `python -m benchmarks copy`\n\nCopies.\n\n**0.512**: ours / theirs. Goal 0.9, met.\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows == [
        "| measured | median |",
        "| seconds, ours | 1 |",
        "| seconds, their own | 2.346 |",
        "| lost | none |",
    ]


def test_a_section_takes_the_place_of_the_one_before_and_leaves_the_others():
    page = updated(updated("", "## a\n\nold\n"), "## b\n\nkept\n")
    assert updated(page, "## a\n\nnew\n") == INTRODUCTION + "\n## a\n\nnew\n\n## b\n\nkept\n"


def test_the_page_has_every_benchmark():
    headings = re.findall(r"^## `python -m benchmarks (\w+)`$", PAGE.read_text(), flags=re.MULTILINE)
    assert sorted(headings) == sorted(found())
