"""Wall time of collection with stragglers and slow tools, compared with the ideal and with lock-step collection."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.conversations import make_env

NUM_SLOTS = 32
NUM_ROLLOUTS = 3072
"""Number of rollouts, large enough that the last round is a small part."""
NUM_TURNS = 4
MEDIAN_S, TOOL_MEDIAN_S = 0.08, 0.04
STRAGGLER_S = 20 * MEDIAN_S
ONE_IN = 50
GOAL = 1.1


def lock_step_seconds(latencies: list[float], tools: list[float]) -> float:
    """Return the seconds of the same draws if each turn waits for the slowest of `NUM_SLOTS`, without overhead."""
    turns = [answer + tool for answer, tool in zip(latencies, tools, strict=True)]
    return sum(max(turns[start : start + NUM_SLOTS]) for start in range(0, len(turns), NUM_SLOTS))


def run() -> dict[str, Any]:
    """Play in real time, so that overhead counts."""
    from transformers import AutoTokenizer

    from llmrl.collectors import LLMCollector
    from llmrl.policies import LLMWrapperBase
    from llmrl.rendering import make_renderer
    from llmrl.testing import ScriptedEngine, log_normal, with_stragglers
    from llmrl.testing.embedded_model import ensure_embedded_model

    renderer = make_renderer(AutoTokenizer.from_pretrained(str(ensure_embedded_model())))
    draw = with_stragglers(log_normal(MEDIAN_S), STRAGGLER_S, one_in=ONE_IN)
    draw_tool = log_normal(TOOL_MEDIAN_S, 1.0, seed=1)
    latencies: list[float] = []
    tools: list[float] = []

    def latency(*_: object) -> float:
        latencies.append(draw())
        return latencies[-1]

    async def tool() -> None:
        tools.append(draw_tool())
        await asyncio.sleep(tools[-1])

    engine = ScriptedEngine([renderer.encode("1 2 3 4<|im_end|>")], latency_s=latency, record_requests=False)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(
        make_env(NUM_TURNS, tool=tool),
        policy=policy,
        groups_per_batch=NUM_ROLLOUTS,
        max_concurrent_rollouts=NUM_SLOTS,
    ) as collector:
        started = time.perf_counter()
        batch = collector.next()
        seconds = time.perf_counter() - started
        longest = max(rollout.seconds for rollout in collector.rollouts)
    assert len(batch) == NUM_ROLLOUTS and len(latencies) == len(tools) == NUM_ROLLOUTS * NUM_TURNS
    work = sum(latencies) + sum(tools)
    ideal = max(work / NUM_SLOTS, longest)
    lock_step = lock_step_seconds(latencies, tools)
    table = Table(title=f"{NUM_ROLLOUTS:,} conversations of {NUM_TURNS} turns in {NUM_SLOTS} slots, tools included")
    table.add_column("measured")
    table.add_column("seconds", justify="right")
    table.add_row("ideal: max(work / slots, longest conversation)", f"{ideal:.2f}")
    table.add_row("collector", f"{seconds:.2f}")
    table.add_row("the same draws in lock-step, without overhead", f"{lock_step:.2f}")
    Console().print(table)
    ratio = seconds / ideal
    return {
        "name": "long_tail",
        "ratio": ratio,
        "ratio_of": "wall time to the ideal max(total work / slots, longest conversation)",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": {
            "collector_s": seconds,
            "ideal_s": ideal,
            "longest_s": longest,
            "lock_step_s": lock_step,
            "lock_step_to_ideal": lock_step / ideal,
        },
    }
