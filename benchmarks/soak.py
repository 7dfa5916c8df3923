"""Conversations with tools for a while: memory, descriptors, threads and processes at the end, to those at the start.

Each conversation runs Python in an interpreter of its own, calls a function that fails every third time, and is
answered by a scripted policy. `python -c "from benchmarks.soak import run; run(3600)"` soaks for an hour.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SECONDS = 30.0
# What is made once, pools and caches, is there by then.
WARM_UP_SHARE = 1 / 3
GROUPS_PER_BATCH = 8
NUM_REPEATS = 4
GOAL = 1.1
# A pool holds an interpreter more or less.
SLACK = 8
CODE = "```python\nx = sum(range({}))\nprint(x)\n```<|im_end|>"
CALL = '<tool_call>{{"name": "measure", "arguments": {{"number": {}}}}}</tool_call><|im_end|>'


def make_collector() -> Any:
    """A collector of conversations of three turns: code, a call, an answer."""
    from llmrl import LLMCollector
    from llmrl.envs import DatasetChatEnv
    from llmrl.policies import LLMWrapperBase
    from llmrl.rendering import TemplateRenderer
    from llmrl.rewards import RewardFn
    from llmrl.testing import ScriptedEngine
    from llmrl.testing.embedded_model import ensure_embedded_model
    from llmrl.transforms import PythonInterpreter, RubricReward, ToolTransform

    def measure(number: int) -> str:
        """Measure something.

        Args:
            number: of the measurement.
        """
        if number % 3 == 0:
            raise ValueError(f"the instrument {number} is broken")
        return "x" * (number % 2000)

    renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
    turns, numbers = (CODE, CALL, "It is done.<|im_end|>"), itertools.count()
    end = renderer.stop_token_ids[0]

    def answer(prompt_ids: list[int]) -> str:
        # The system's message and the user's end with one each, a turn and what answers it with two.
        return turns[(prompt_ids.count(end) - 2) // 2 % 3].format(next(numbers))

    env = DatasetChatEnv([{"query": f"Measure number {index}."} for index in range(64)], repeats=NUM_REPEATS)
    env = env.append_transform(PythonInterpreter(persistent=True)).append_transform(ToolTransform([measure]))
    env = env.append_transform(RubricReward(RewardFn(lambda: 1.0, name="one")))
    engine = ScriptedEngine(answer, encode=renderer.encode, record_requests=False)
    policy = LLMWrapperBase(engine, renderer=renderer)
    return LLMCollector(env, policy=policy, groups_per_batch=GROUPS_PER_BATCH)


def used() -> dict[str, float]:
    """Memory of this process and its children, its descriptors and threads, and the number of its children."""
    gc.collect()
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    family = {int(Path("/proc/self").resolve().name)}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    num_bytes = 0.0
    for pid in family:
        try:
            status = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        num_bytes += 1024 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("Pss:"))
    return {
        "memory_mib": round(num_bytes / (1 << 20), 1),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "processes": len(family),
    }


def run(seconds: float = SECONDS) -> dict[str, Any]:
    """Soak for so many seconds, print what was used before and after, and give the ratio."""
    num_rollouts, before = 0, {}
    with make_collector() as collector:
        started = time.monotonic()
        for batch in collector:
            num_rollouts += len(batch)
            elapsed = time.monotonic() - started
            if not before and elapsed > WARM_UP_SHARE * seconds:
                before = used()
            elif before and elapsed > seconds:
                break
        after = used()
    table = Table(title=f"{num_rollouts} conversations in {seconds:g} s")
    for column in ("", "after a third", "at the end"):
        table.add_column(column, justify="right")
    for name, value in before.items():
        table.add_row(name, f"{value:.4g}", f"{after[name]:.4g}")
    Console().print(table)
    ratio = after["memory_mib"] / before["memory_mib"]
    are_counts_flat = all(after[name] <= before[name] + SLACK for name in ("descriptors", "threads", "processes"))
    return {
        "name": "soak",
        "ratio": round(ratio, 3),
        "ratio_of": "memory of the process and its children, at the end of the soak to after its first third",
        "goal": GOAL,
        "met": ratio <= GOAL and are_counts_flat,
        "medians": {"after a third": before, "at the end": after, "conversations": num_rollouts},
    }
