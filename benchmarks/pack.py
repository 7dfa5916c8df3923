"""Tokens that packing computes, beside those that are distinct, and how its own time grows with the rows.

Sixteen samples of one prompt, in four lengths of prompt and completion: a token is distinct when no other has the same
tokens before it, and each of those needs computing once (the last of a row not at all). The time is that of
`pack_rows` on rows of 130 to 230 tokens, ungrouped and in groups of sixteen.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmrl.trainer.packing.packed_rows import pack_rows

NUM_SAMPLES = 16
SHAPES = ((100, 50), (200, 300), (1500, 500), (4000, 200))
TOKEN_BUDGET = 16384
GOAL = 1.1
NUM_REPEATS = 5


def group(num_prompt: int, num_completion: int, num_samples: int = NUM_SAMPLES) -> tuple[list[Any], list[Any]]:
    """Rows of one prompt with random completions, and masks of the completions."""
    prompt = torch.randint(0, 50_000, (num_prompt,))
    rows = [torch.cat([prompt, torch.randint(0, 50_000, (num_completion,))]) for _ in range(num_samples)]
    return rows, [torch.arange(len(row)) >= num_prompt for row in rows]


def _seconds(rows: list[Any], masks: list[Any]) -> float:
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        pack_rows(rows, masks)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def run() -> dict[str, Any]:
    """Pack each, print the table, return the result."""
    torch.manual_seed(0)
    medians: dict[str, float] = {}
    for num_prompt, num_completion in SHAPES:
        num_distinct = num_prompt + NUM_SAMPLES * (num_completion - 1)
        packed = pack_rows(*group(num_prompt, num_completion), token_budget=TOKEN_BUDGET)
        num_computed = sum(micro_batch.num_packed_tokens for micro_batch in packed)
        medians[f"computed over distinct, {num_prompt} + {num_completion}"] = num_computed / num_distinct
    ratio = max(medians.values())
    for num_groups in (8, 64, 256, 512):
        parts = [group(int(n), int(c)) for n, c in torch.randint(65, 116, (num_groups, 2))]
        rows, masks = ([row for part in parts for row in part[which]] for which in (0, 1))
        medians[f"{len(rows)} rows in groups of {NUM_SAMPLES}, s"] = _seconds(rows, masks)
    for num_rows in (128, 1024, 4096, 8192):
        parts = [group(20, int(c), 1) for c in torch.randint(110, 211, (num_rows,))]
        rows, masks = ([row for part in parts for row in part[which]] for which in (0, 1))
        medians[f"{num_rows} rows by themselves, s"] = _seconds(rows, masks)
    table = Table("measured", "median", title="packing")
    for name, value in medians.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return {
        "name": "pack",
        "ratio": ratio,
        "ratio_of": "computed tokens to distinct ones, the worst of four shapes",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": medians,
    }
