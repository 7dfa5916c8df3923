"""Seconds of training until the demo's mean reward reaches 0.9, compared with a plain transformers loop."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from llmrl.testing.embedded_model import ensure_embedded_model

TARGET_REWARD = 0.9
NUM_STEPS = 30
GOAL = 0.6
_SCRIPT = Path(__file__).parent.parent / "sota-implementations" / "grpo" / "grpo-sync.py"


def seconds_to_target(log: list[dict[str, float]]) -> float:
    """Return the seconds of the steps up to the first with a mean reward of at least the target, or infinity.

    Example:
        >>> seconds_to_target([{"reward_mean": 0.5, "seconds": 2.0}, {"reward_mean": 0.95, "seconds": 1.0}])
        3.0
    """
    total = 0.0
    for row in log:
        total += row["seconds"]
        if row["reward_mean"] >= TARGET_REWARD:
            return total
    return float("inf")


def _run_ours(seed: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(_SCRIPT),
            f"run.path={folder}/run",
            f"seed={seed}",
            f"train.num_steps={NUM_STEPS}",
        ]
        command.append(f"train.target_reward={TARGET_REWARD}")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with (Path(folder) / "run" / "metrics.csv").open() as file:
            rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        return [row for row in rows if "seconds" in row]


def _run_plain(seed: int) -> list[dict[str, float]]:
    # A separate process, as for llmrl, so that neither loop inherits the other's memory or threads.
    code = (
        "import json, sys; from benchmarks.plain_loop import run_plain_loop;"
        f"log = run_plain_loop(sys.argv[1], num_steps={NUM_STEPS}, target_reward={TARGET_REWARD}, seed={seed});"
        "print(json.dumps(log))"
    )
    command = [sys.executable, "-c", code, str(ensure_embedded_model())]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.strip().splitlines()[-1])


def run(seed: int = 0) -> dict[str, Any]:
    """Train with both loops and compare."""
    logs = {"llmrl": _run_ours(seed), "plain transformers loop": _run_plain(seed)}
    table = Table(title="seconds of training to mean reward 0.9")
    for title in ("", "seconds", "steps", "generate s/step", "train s/step", "sync s/step"):
        table.add_column(title, justify="left" if not title else "right")
    splits: dict[str, dict[str, float]] = {}
    for name, log in logs.items():
        split = {
            part: sum(row.get(f"{part}_seconds", 0.0) for row in log) / len(log)
            for part in ("generate", "train", "sync")
        }
        splits[name] = {"seconds": seconds_to_target(log), "num_steps": len(log), **split}
        table.add_row(name, f"{seconds_to_target(log):.1f}", str(len(log)), *(f"{v:.2f}" for v in split.values()))
    Console().print(table)
    ratio = splits["llmrl"]["seconds"] / splits["plain transformers loop"]["seconds"]
    return {
        "name": "demo_speed",
        "ratio": ratio,
        "ratio_of": "seconds of training to mean reward 0.9, llmrl / plain transformers loop",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": splits,
    }
