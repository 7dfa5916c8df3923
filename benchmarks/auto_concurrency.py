"""Rollouts per second with the automatic number in flight and with the best fixed number, on four simulated loads.

The scheduler, the gate and the rule for the number are real. The engine is a model of vLLM's scheduler with a key-value
cache of 200,000 tokens, in virtual time. Short and long-tailed answers of one turn fill the cache while they are
sampled. Agents wait for tools, and meanwhile their contexts are evicted if too many rollouts are in flight. Rollouts
are counted in the second half of the batches.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulated_engine import SimulatedEngine
from benchmarks.simulated_source import SimulatedSource, completed
from llmrl.collectors.concurrency import FIRST_LIMIT, ConcurrencyLimit, TurnCounts, follow_load
from llmrl.collectors.gates import StalenessGate
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.scheduler import RolloutScheduler, RolloutTask
from llmrl.data import Rollout
from llmrl.engines import SamplingConfig
from llmrl.testing import run_in_virtual_time

NUM_MEMORY_TOKENS = 200_000
GROUP_SIZE, GROUPS_PER_BATCH, NUM_BATCHES = 4, 64, 8
GOAL = 0.95


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of rollouts. Pairs are median and sigma of a log-normal distribution."""

    fixed_numbers: Sequence[int]
    """Fixed numbers of rollouts in flight to compare; the best number is among them."""
    num_prompt_tokens: int
    answer: tuple[float, float]
    num_turns: int = 1
    num_result_tokens: int = 0
    """Number of tokens that a tool returns after each turn."""
    tool_s: tuple[float, float] = (1.0, 0.0)
    outage_probability: float = 0.0
    """Probability that a tool call takes half a minute longer."""


LOADS = {
    "short answers": Load((128, 256, 512), 200, (300, 0.4)),
    "long tail": Load((96, 128, 192, 256), 200, (400, 1.0)),
    "agents": Load((40, 50, 60, 70, 100), 500, (80, 0.5), 8, 600, (2.0, 0.8)),
    "long prompts, outages": Load((32, 40, 50, 60, 90), 1000, (30, 0.5), 4, 2000, (1.0, 1.0), 0.02),
}


@dataclass(slots=True, kw_only=True)
class LoadedSource(SimulatedSource):
    """Source of the rollouts of a load, which have the same lengths in every run."""

    load: Load
    turn_counts: TurnCounts = field(default_factory=TurnCounts)

    def take_turn_counts(self) -> TurnCounts:
        """Return the counts of cached contexts in the turns since the last call."""
        counts, self.turn_counts = self.turn_counts, TurnCounts()
        return counts

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play the turns of a rollout, with tools between them."""
        rollout, load = job.records[0], self.load
        draw = random.Random(rollout.rollout_id)
        num_tokens, num_seen = load.num_prompt_tokens, None
        for turn in range(load.num_turns):
            num_sampled = round(min(6000.0, max(1.0, _log_normal(draw, load.answer))))
            sampling = SamplingConfig(max_new_tokens=num_sampled)
            completion = await self.engine.generate(range(num_tokens), sampling, routing_key=rollout.rollout_id)
            self.turn_counts.count(completion, num_seen)
            num_seen = num_tokens + num_sampled
            num_tokens = num_seen + load.num_result_tokens
            rollout.num_completion_tokens += num_sampled
            if turn + 1 < load.num_turns:
                outage_s = 30.0 if draw.random() < load.outage_probability else 0.0
                await asyncio.sleep(_log_normal(draw, load.tool_s) + outage_s)
        return completed(rollout, load.num_turns)


def _log_normal(draw: random.Random, of: tuple[float, float]) -> float:
    return draw.lognormvariate(math.log(of[0]), of[1])


async def collect(load: Load, max_concurrent_rollouts: int | None, num_batches: int = NUM_BATCHES) -> dict[str, float]:
    """Collect with a fixed number in flight, or an automatic one (None); return rollouts per second and preemptions."""
    engine = SimulatedEngine(NUM_MEMORY_TOKENS)
    source = LoadedSource(engine=engine, group_size=GROUP_SIZE, load=load)
    scheduler = RolloutScheduler(
        source,
        StalenessGate(GROUPS_PER_BATCH, max_staleness=num_batches + 8),
        rules=GroupRules(),
        max_concurrent_rollouts=max_concurrent_rollouts or FIRST_LIMIT,
    )
    following = None
    if max_concurrent_rollouts is None:
        limit = ConcurrencyLimit(FIRST_LIMIT, most=1024)
        following = asyncio.create_task(follow_load(source, scheduler, limit))
    loop, started_s, num_preempted = asyncio.get_running_loop(), 0.0, 0
    for batch in range(num_batches):
        await scheduler.next_batch()
        if batch == num_batches // 2 - 1:
            started_s, num_preempted = loop.time(), engine.num_preemptions
    num_rollouts = (num_batches - num_batches // 2) * GROUPS_PER_BATCH * GROUP_SIZE
    found = {
        "rollouts_per_s": num_rollouts / (loop.time() - started_s),
        "preemptions_per_rollout": (engine.num_preemptions - num_preempted) / num_rollouts,
        "in_flight": scheduler.max_concurrent_rollouts,
    }
    if following is not None:
        following.cancel()
    await scheduler.stop()
    return found


def run() -> dict[str, Any]:
    """Simulate every load with each fixed number and with the automatic number."""
    table = Table(title="rollouts per second of the simulated engine")
    for column in (
        "load",
        "best fixed number",
        "rollouts/s",
        "automatic",
        "rollouts/s",
        "preemptions per rollout",
        "ratio",
    ):
        table.add_column(column, justify="left" if column == "load" else "right")
    medians: dict[str, Any] = {}
    for name, load in LOADS.items():
        fixed = {number: run_in_virtual_time(collect(load, number)) for number in load.fixed_numbers}
        best = max(fixed, key=lambda number: fixed[number]["rollouts_per_s"])
        found, speed = run_in_virtual_time(collect(load, None)), fixed[best]["rollouts_per_s"]
        ratio = found["rollouts_per_s"] / speed
        medians[name] = {
            "best_fixed_number": best,
            "found_number": found["in_flight"],
            "rollouts_per_s": found["rollouts_per_s"],
            "preemptions_per_rollout": found["preemptions_per_rollout"],
            "most_fixed_to_best": fixed[max(fixed)]["rollouts_per_s"] / speed,
            "ratio": ratio,
        }
        figures = (f"{speed:.2f}", f"{found['in_flight']:.0f}", f"{found['rollouts_per_s']:.2f}")
        table.add_row(name, str(best), *figures, f"{found['preemptions_per_rollout']:.2f}", f"{ratio:.3f}")
    Console().print(table)
    ratio = min(one["ratio"] for one in medians.values())
    return {
        "name": "auto_concurrency",
        "ratio": ratio,
        "ratio_of": "rollouts per second with the automatic number in flight to the best fixed number, worst load",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "medians": medians,
    }
