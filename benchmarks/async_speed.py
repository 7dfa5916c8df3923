"""Seconds of a training step of the demo, with asynchronous and with synchronous generation, on the same two cores.

Engine and trainer each use all cores, so overlapping cannot use idle devices; it pays only if each has its own devices.
The benchmark shows that overlapping costs little otherwise.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_STEPS = 6
NUM_ROUNDS = 2
GROUP_SIZE, GROUPS_PER_BATCH = 8, 16
GOAL = 1.1
_SCRIPTS = Path(__file__).parent.parent / "sota-implementations" / "grpo"


def medians_of(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return medians over steps, and tokens per second of whole steps.

    Example:
        >>> step = {"seconds": 2.0, "generate_seconds": 1.0, "train_seconds": 0.5, "sync_seconds": 0.5}
        >>> medians_of([{**step, "completion_tokens_mean": 10.0, "staleness_max": 0.0}])["tokens_per_second"]
        640.0
    """
    names = ("seconds", "generate_seconds", "train_seconds", "sync_seconds", "staleness_max")
    medians = {name: statistics.median(step[name] for step in steps) for name in names}
    num_tokens = sum(step["completion_tokens_mean"] * GROUP_SIZE * GROUPS_PER_BATCH for step in steps)
    return {**medians, "tokens_per_second": num_tokens / sum(step["seconds"] for step in steps)}


def _run(script: str, num_steps: int) -> list[dict[str, float]]:
    """Return the metrics of every step except the first, which waits for a first batch in both scripts."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = {
            "run.path": f"{folder}/run",
            "run.checkpoint_every": num_steps + 1,
            "eval.num_problems": 1,
            "collect.group_size": GROUP_SIZE,
            "collect.groups_per_batch": GROUPS_PER_BATCH,
            "train.num_steps": num_steps,
        }
        command = [sys.executable, str(_SCRIPTS / script), *(f"{name}={value}" for name, value in overrides.items())]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with Path(folder, "run/metrics.csv").open() as file:
            rows = [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
        return [row for row in rows if "seconds" in row][1:]


def run(*, num_steps: int = NUM_STEPS, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Run both scripts alternately and compare."""
    steps: dict[str, list[dict[str, float]]] = {"grpo-sync": [], "grpo-async": []}
    for _ in range(num_rounds):
        for name, collected in steps.items():
            collected += _run(f"{name}.py", num_steps)
    medians = {name: medians_of(collected) for name, collected in steps.items()}
    table = Table(title=f"{num_steps} steps of the demo, without the first")
    for title in ("", "s/step", "waiting for a batch", "training", "sync", "sampled tokens/s", "staleness"):
        table.add_column(title, justify="right" if title else "left")
    for name, values in medians.items():
        shares = (values[f"{part}_seconds"] for part in ("generate", "train", "sync"))
        columns = (values["seconds"], *shares, values["tokens_per_second"], values["staleness_max"])
        table.add_row(name, *(f"{value:.2f}" for value in columns))
    Console().print(table)
    ratio = medians["grpo-async"]["seconds"] / medians["grpo-sync"]["seconds"]
    return {
        "name": "async_speed",
        "ratio": ratio,
        "ratio_of": "median seconds of a step, grpo-async / grpo-sync, same batches on the same cores",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": medians,
    }
