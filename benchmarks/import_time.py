"""Time to import llmrl, beside torchrl; and all of llmrl's packages, beside the parts of torchrl they extend."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

NUM_REPEATS = 5
GOAL_EXTRA_SECONDS = 1.0
HEAVY = ("vllm", "ray", "transformers.models")
# The parts of torchrl that ours extend. Of torchrl 0.14, `envs` imports ray where it is installed.
TORCHRL_PARTS = ["torchrl", "torchrl.data", "torchrl.envs", "torchrl.objectives"]
_ROOT = Path(__file__).parent.parent

_CODE = """
import importlib, json, sys, time
names = sys.argv[1].split(",")
started = time.perf_counter()
for name in names:
    importlib.import_module(name)
seconds = time.perf_counter() - started
heavy = [m for m in sys.modules if any(m == h or m.startswith(h + ".") for h in sys.argv[2].split(","))]
print(json.dumps({"seconds": seconds, "heavy": heavy}))
"""


def import_once(names: list[str]) -> dict[str, Any]:
    """Seconds to import `names` in a fresh process, and which of the heavy modules came along."""
    command = [sys.executable, "-c", _CODE, ",".join(names), ",".join(HEAVY)]
    output = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def packages() -> list[str]:
    """llmrl and its packages."""
    return ["llmrl", *sorted(f"llmrl.{path.parent.name}" for path in (_ROOT / "llmrl").glob("*/__init__.py"))]


def run() -> dict[str, Any]:
    """Measure in turn, so that a busy moment of the machine meets all alike."""
    cases = {
        "torchrl": ["torchrl"],
        "llmrl": ["llmrl"],
        "torchrl, the parts extended": TORCHRL_PARTS,
        "llmrl, all packages": packages(),
    }
    seconds: dict[str, list[float]] = {title: [] for title in cases}
    heavy: dict[str, set[str]] = {title: set() for title in cases}
    for names in cases.values():
        import_once(names)  # compiles and reads the files once
    for _ in range(NUM_REPEATS):
        for title, names in cases.items():
            measured = import_once(names)
            seconds[title].append(measured["seconds"])
            heavy[title] |= set(measured["heavy"])
    medians = {title: statistics.median(values) for title, values in seconds.items()}
    table = Table(title="seconds to import, median of a fresh process each")
    table.add_column("")
    table.add_column("seconds", justify="right")
    for title, value in medians.items():
        table.add_row(title, f"{value:.2f}")
    Console().print(table)
    extra = medians["llmrl"] - medians["torchrl"]
    extra_packages = medians["llmrl, all packages"] - medians["torchrl, the parts extended"]
    ours = heavy["llmrl"] | (heavy["llmrl, all packages"] - heavy["torchrl, the parts extended"])
    return {
        "name": "import_time",
        # Of `import llmrl` alone the ratio would flatter: it loads nothing until a name is used.
        "ratio": medians["llmrl, all packages"] / medians["torchrl, the parts extended"],
        "ratio_of": "seconds to import all packages of llmrl / seconds to import the parts of torchrl they extend",
        "goal": 1 + GOAL_EXTRA_SECONDS / medians["torchrl, the parts extended"],
        "met": max(extra, extra_packages) < GOAL_EXTRA_SECONDS and not ours,
        "medians": {
            **medians,
            "extra_seconds": extra,
            "extra_seconds_of_all_packages": extra_packages,
            "heavy_modules_of_ours": sorted(ours),
        },
    }
