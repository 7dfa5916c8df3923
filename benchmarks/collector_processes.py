"""Turns per second of several collector processes, one per core, and of one process; engines answer immediately.

The process that receives their batches, and Ray, run on the same cores. Therefore the collectors' share of all CPU time
is the maximum efficiency if there are as many cores as collectors. The rest is waiting and other work of the machine.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.collector_overhead import ANSWER
from benchmarks.conversations import make_env

NUM_TURNS = 4
NUM_PROCESSES = 2
GROUPS_PER_BATCH, GROUP_SIZE = 64, 8
NUM_BATCHES, NUM_REPEATS = 6, 3
GOAL = 0.9


def make_conversations() -> Any:
    """Return the environment that every process plays."""
    return make_env(NUM_TURNS, repeats=GROUP_SIZE)


def make_policy() -> Any:
    """Return a policy with an engine that answers immediately, so that only the collector's Python takes time."""
    from transformers import AutoTokenizer

    from llmrl.policies import LLMWrapperBase
    from llmrl.rendering import make_renderer
    from llmrl.testing import ScriptedEngine
    from llmrl.testing.embedded_model import ensure_embedded_model

    renderer = make_renderer(AutoTokenizer.from_pretrained(str(ensure_embedded_model())))
    return LLMWrapperBase(ScriptedEngine([renderer.encode(ANSWER)], record_requests=False), renderer=renderer)


def cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds of this process and of its descendants, by process."""
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        stats[int(folder.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    own = {os.getpid()}
    while started := {process for process, (parent, _) in stats.items() if parent in own} - own:
        own |= started
    return {process: stats[process][1] for process in own}


def rate(num_processes: int) -> tuple[float, float]:
    """Return the turns per second of collector processes, and their share of all CPU time.

    The remaining CPU time is that of Ray and of this process, which receives the batches.
    """
    import ray

    from llmrl.collectors import RayLLMCollector

    with RayLLMCollector(
        make_conversations,
        policy_factory=make_policy,
        num_collectors=num_processes,
        groups_per_batch=GROUPS_PER_BATCH,
        num_cpus=0,
        sync_iter=False,
    ) as collector:
        processes = ray.get([actor.process_id.remote() for actor in collector.ray_source.actors])
        for _ in range(2):
            collector.next()
        started, before = time.perf_counter(), cpu_seconds()
        num_rows = sum(len(collector.next()) for _ in range(NUM_BATCHES))
        seconds = time.perf_counter() - started
        spent = {process: total - before.get(process, 0.0) for process, total in cpu_seconds().items()}
    assert num_rows == NUM_BATCHES * GROUPS_PER_BATCH * GROUP_SIZE
    return num_rows * NUM_TURNS / seconds, sum(spent[process] for process in processes) / sum(spent.values())


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects both cases."""
    import ray

    ray.init(address="local", num_cpus=NUM_PROCESSES, include_dashboard=False, log_to_driver=False)
    try:
        rates = [(*rate(1), *rate(NUM_PROCESSES)) for _ in range(NUM_REPEATS)]
    finally:
        ray.shutdown()
    one, _, several, share = (statistics.median(column) for column in zip(*rates, strict=True))
    efficiency = several / (NUM_PROCESSES * one)
    table = Table(
        "collector processes", "turns per second", title=f"Conversations of {NUM_TURNS} turns, Ray on one machine"
    )
    table.add_row("1", f"{one:,.0f}")
    table.add_row(str(NUM_PROCESSES), f"{several:,.0f}")
    Console().print(table)
    return {
        "name": "collector_processes",
        "ratio": round(efficiency, 3),
        "ratio_of": f"turns per second of {NUM_PROCESSES} processes to {NUM_PROCESSES} times those of one process",
        "goal": GOAL,
        "met": efficiency >= GOAL,
        "medians": {
            "turns a second, 1 process": round(one),
            f"turns a second, {NUM_PROCESSES} processes": round(several),
            f"their share of all CPU time, {NUM_PROCESSES} processes: the most on as many cores": round(share, 3),
            "cores": os.cpu_count(),
        },
    }
