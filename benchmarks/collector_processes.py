"""Turns a second of collector processes, one for each core, beside one such process: engines answer at once."""

from __future__ import annotations

import statistics
import time
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
    """The conversations that every process plays."""
    return make_env(NUM_TURNS, repeats=GROUP_SIZE)


def make_policy() -> Any:
    """A policy over an engine of its own, which answers at once: what is left is the collector's Python."""
    from transformers import AutoTokenizer

    from llmrl.policies import LLMWrapperBase
    from llmrl.rendering import make_renderer
    from llmrl.testing import ScriptedEngine
    from llmrl.testing.embedded_model import ensure_embedded_model

    renderer = make_renderer(AutoTokenizer.from_pretrained(str(ensure_embedded_model())))
    return LLMWrapperBase(ScriptedEngine([renderer.encode(ANSWER)], record_requests=False), renderer=renderer)


def rate(num_processes: int) -> float:
    """Turns a second of so many processes, while their batches are read one after another."""
    from llmrl.collectors import RayLLMCollector

    with RayLLMCollector(
        make_conversations,
        policy_factory=make_policy,
        num_collectors=num_processes,
        groups_per_batch=GROUPS_PER_BATCH,
        num_cpus=0,
        sync_iter=False,
    ) as collector:
        for _ in range(2):
            collector.next()
        started = time.perf_counter()
        num_rows = sum(len(collector.next()) for _ in range(NUM_BATCHES))
        seconds = time.perf_counter() - started
    assert num_rows == NUM_BATCHES * GROUPS_PER_BATCH * GROUP_SIZE
    return num_rows * NUM_TURNS / seconds


def run() -> dict[str, Any]:
    """Measure in turn, so that a busy moment of the machine meets both."""
    import ray

    ray.init(address="local", num_cpus=NUM_PROCESSES, include_dashboard=False, log_to_driver=False)
    try:
        rates = [(rate(1), rate(NUM_PROCESSES)) for _ in range(NUM_REPEATS)]
    finally:
        ray.shutdown()
    one, several = (statistics.median(column) for column in zip(*rates, strict=True))
    efficiency = several / (NUM_PROCESSES * one)
    table = Table(
        "collector processes", "turns a second", title=f"Conversations of {NUM_TURNS} turns, Ray on one machine"
    )
    table.add_row("1", f"{one:,.0f}")
    table.add_row(str(NUM_PROCESSES), f"{several:,.0f}")
    Console().print(table)
    return {
        "name": "collector_processes",
        "ratio": round(efficiency, 3),
        "ratio_of": f"turns a second of {NUM_PROCESSES} processes to {NUM_PROCESSES} times those of one",
        "goal": GOAL,
        "met": efficiency >= GOAL,
        "medians": {
            "turns a second, 1 process": round(one),
            f"turns a second, {NUM_PROCESSES} processes": round(several),
        },
    }
