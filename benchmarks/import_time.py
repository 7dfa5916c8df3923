"""Time to import llmrl and torchrl, and all packages of llmrl and the parts of torchrl that they extend."""

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
# The parts of torchrl that llmrl extends. In torchrl 0.14, `envs` imports ray if it is installed.
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
    """Return the seconds to import `names` in a new process, and the heavy modules that were imported."""
    command = [sys.executable, "-c", _CODE, ",".join(names), ",".join(HEAVY)]
    output = subprocess.run(command, cwd=_ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def packages() -> list[str]:
    """Return the names of llmrl and its packages."""
    return ["llmrl", *sorted(f"llmrl.{path.parent.name}" for path in (_ROOT / "llmrl").glob("*/__init__.py"))]


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    cases = {
        "torchrl": ["torchrl"],
        "llmrl": ["llmrl"],
        "torchrl, the parts extended": TORCHRL_PARTS,
        "llmrl, all packages": packages(),
    }
    seconds: dict[str, list[float]] = {title: [] for title in cases}
    heavy: dict[str, set[str]] = {title: set() for title in cases}
    for names in cases.values():
        import_once(names)  # warm-up: compiles the files, and reads them into the page cache
    for _ in range(NUM_REPEATS):
        for title, names in cases.items():
            measured = import_once(names)
            seconds[title].append(measured["seconds"])
            heavy[title] |= set(measured["heavy"])
    medians = {title: statistics.median(values) for title, values in seconds.items()}
    table = Table(title="seconds to import in a new process, median")
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
        # The ratio of `import llmrl` alone would be too good: it loads nothing until a name is used.
        "ratio": medians["llmrl, all packages"] / medians["torchrl, the parts extended"],
        "ratio_of": "seconds to import all packages of llmrl / seconds to import the parts of torchrl that they extend",
        "goal": 1 + GOAL_EXTRA_SECONDS / medians["torchrl, the parts extended"],
        "met": max(extra, extra_packages) < GOAL_EXTRA_SECONDS and not ours,
        "medians": {
            **medians,
            "extra_seconds": extra,
            "extra_seconds_of_all_packages": extra_packages,
            "heavy_modules_of_ours": sorted(ours),
        },
    }
