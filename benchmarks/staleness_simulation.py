"""Benefit of collecting ahead: rollouts per second, utilization of engines and staleness, on a simulated cluster.

The real scheduler, gates and replicas run in virtual time: 512 replicas that serve 16 sequences each, and 102,400
rollouts of two turns for each way of collecting. Durations of answers are log-normal (median one minute, sigma 0.8),
with a limit of five minutes. A tool call between answers follows a Pareto distribution of shape 1.5 with a limit of one
minute; one call in two hundred always reaches it, and all tools fail for one minute in every twenty. Each minute one of
the 512 replicas dies. It returns after five minutes with the current weights, and its requests are repeated elsewhere.
A batch is 4,096 rollouts in groups of 8. Training takes 40 s, and the transfer of new weights 30 s while the engines
generate, together about as long as engines without idle time need for a batch. Then the engines pause for 5 s. Requests
in flight continue with the new weights (*partial rollouts*), or the update waits until they end.

Engines and trainer have separate machines, so synchronous collection leaves most of them idle; a system in which both
share one set of GPUs loses less. Only the clock, the answers of engines and tools, and the trainer are simulated. These
are not measurements of a real cluster. For real clusters, the following speedups over systems of the authors' choice
have been reported:

| system | reported | GPUs |
|---|---|---|
| AReaL (arXiv:2505.24298): bounded staleness, interrupted generation | training up to 2.77 times as fast as synchronous | up to 512 |
| PipelineRL (arXiv:2509.19128): updates in flight | learning about 2 times as fast as conventional | 128 |
| Laminar (arXiv:2510.12633): each replica takes weights by itself | up to 5.48 times the training throughput | 1,024 |
"""  # noqa: E501  # rows of a table are not broken

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.simulated_source import SimulatedSource, completed
from llmrl.collectors.gates import DemandGate, StalenessGate
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.scheduler import RolloutScheduler, RolloutTask
from llmrl.data import Rollout
from llmrl.engines import Completion, EngineReplicas, SamplingConfig
from llmrl.testing import ScriptedEngine, log_normal, run_in_virtual_time

NUM_REPLICAS, SEQUENCES_PER_REPLICA = 512, 16
GROUP_SIZE, GROUPS_PER_BATCH, NUM_BATCHES, NUM_TURNS = 8, 512, 25, 2
NUM_WARM_UP = 5
"""Number of batches that are not counted, until collection is ahead."""
ANSWER_MEDIAN_S, ANSWER_SIGMA, ANSWER_MOST_S = 60.0, 0.8, 300.0
TOOL_LEAST_S, TOOL_SHAPE, TOOL_MOST_S = 1.0, 1.5, 60.0
LOST_PROBABILITY = 0.005
OUTAGE_S, OUTAGE_EVERY_S = 60.0, 1200.0
DEATH_EVERY_S, RESTART_S = 60.0, 300.0
TRAIN_S, TRANSFER_S, LOAD_S = 40.0, 30.0, 5.0
SAMPLING = SamplingConfig(max_new_tokens=1)
GOAL = 1.5


class Replica(ScriptedEngine):
    """An engine that can die, return, and refuse new requests until it has new weights."""

    def __init__(self, latency_s: Callable[..., float]) -> None:
        super().__init__([[7]], latency_s=latency_s, max_num_seqs=SEQUENCES_PER_REPLICA, record_requests=False)
        self.is_open = asyncio.Event()
        self.is_open.set()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingConfig, **names: Any) -> Completion:
        """Sample as soon as the engine accepts requests."""
        await self.is_open.wait()
        return await super().generate(prompt_ids, sampling, **names)

    def come_back(self) -> None:
        """Serve again, with the initial weights."""
        self._is_shut_down, self._policy_version = False, 0
        self.resume()


class ToolSource(SimulatedSource):
    """Source of rollouts of `NUM_TURNS` turns with tools."""

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play the turns of a rollout, with tools between them."""
        rollout, draw = job.records[0], random.Random(job.records[0].rollout_id)
        for turn in range(NUM_TURNS):
            request_id = f"{rollout.rollout_id}/{turn}"
            await self.engine.generate([1], SAMPLING, request_id=request_id, routing_key=rollout.rollout_id)
            rollout.num_completion_tokens += 1
            if turn + 1 < NUM_TURNS:
                out_s = OUTAGE_S - asyncio.get_running_loop().time() % OUTAGE_EVERY_S
                is_lost = draw.random() < LOST_PROBABILITY
                seconds = TOOL_MOST_S if is_lost else TOOL_LEAST_S * draw.paretovariate(TOOL_SHAPE)
                await asyncio.sleep(max(out_s, min(TOOL_MOST_S, seconds)))
        return completed(rollout, NUM_TURNS)


async def kill_and_restart(replicas: EngineReplicas[Replica], engines: list[Replica]) -> None:
    """Let a replica die each minute, and return later."""
    draw = random.Random(1)

    async def restart(engine: Replica, index: int) -> None:
        await asyncio.sleep(RESTART_S)
        engine.come_back()
        while index not in replicas.serving:  # a thread sends the weights, which takes no virtual time
            time.sleep(1e-4)

    async with asyncio.TaskGroup() as restarts:
        while True:
            await asyncio.sleep(DEATH_EVERY_S)
            index = draw.randrange(NUM_REPLICAS)
            if engines[index].is_alive:
                engines[index].shutdown()
                replicas.refresh()
                restarts.create_task(restart(engines[index], index))


async def update(engines: list[Replica], version: int, *, waits: bool) -> None:
    """Send new weights to all engines that are alive."""
    await asyncio.sleep(TRANSFER_S)
    for engine in engines:
        engine.is_open.clear() if waits else engine.pause()
    while waits and any(engine.num_in_flight for engine in engines):
        await asyncio.sleep(1.0)
    await asyncio.sleep(LOAD_S)
    for engine in engines:
        if engine.is_alive:
            engine.policy_version = version
        engine.is_open.set() if waits else engine.resume()


async def simulate(make_gate: Callable[[], Any], max_staleness: int, waits: bool) -> dict[str, float]:
    """Collect, train and update; return the measurements of the batches after the warm-up."""
    draw = log_normal(ANSWER_MEDIAN_S, ANSWER_SIGMA)
    engines = [Replica(lambda *_: min(ANSWER_MOST_S, draw())) for _ in range(NUM_REPLICAS)]
    gate = make_gate()
    gate.follows_versions = False  # `notify` reports each version, so that the gate need not poll 20 times per second
    replicas = EngineReplicas(engines, hang_timeout_seconds=None, num_retries=5)
    current = 0
    replicas.before_serving.append(lambda engine: setattr(engine, "policy_version", current))
    scheduler = RolloutScheduler(
        ToolSource(engine=replicas, group_size=GROUP_SIZE),
        gate,
        rules=GroupRules(),
        patience=GROUPS_PER_BATCH,
        max_concurrent_rollouts=(1 + max_staleness) * GROUPS_PER_BATCH * GROUP_SIZE,
    )
    loop, staleness = asyncio.get_running_loop(), list[int]()
    deaths = asyncio.create_task(kill_and_restart(replicas, engines))
    busy_s = started_s = waited_s = 0.0
    for batch in range(NUM_BATCHES):
        if batch == NUM_WARM_UP:
            busy_s, started_s, waited_s = sum(engine.busy_s for engine in engines), loop.time(), 0.0
            staleness = []
        asked_s = loop.time()
        delivery = await scheduler.next_batch()
        assert delivery is not None
        waited_s += loop.time() - asked_s
        staleness += delivery.staleness
        await asyncio.sleep(TRAIN_S)
        await update(engines, batch + 1, waits=waits)
        current = batch + 1  # not earlier: a replica that returns with newer weights would get all requests
        replicas.refresh()
        scheduler.notify()
    elapsed_s = loop.time() - started_s
    busy_s = sum(engine.busy_s for engine in engines) - busy_s
    deaths.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await deaths
    await scheduler.stop()
    return {
        "rollouts_per_s": (NUM_BATCHES - NUM_WARM_UP) * GROUPS_PER_BATCH * GROUP_SIZE / elapsed_s,
        "engine_use": busy_s / (elapsed_s * NUM_REPLICAS * SEQUENCES_PER_REPLICA),
        "trainer_waits": waited_s / elapsed_s,
        "staleness_mean": statistics.fmean(staleness),
        "staleness_max": max(staleness),
        "deaths": replicas.num_deaths,
        "requests_tried_again": replicas.num_retried,
    }


def run() -> dict[str, Any]:
    """Simulate every way of collecting, with the same lengths."""

    def ahead(bound: int, **options: str) -> Callable[[], StalenessGate]:
        return lambda: StalenessGate(GROUPS_PER_BATCH, max_staleness=bound, **options)

    ways: dict[str, tuple[Callable[[], Any], int, bool]] = {
        "synchronous": (lambda: DemandGate(GROUPS_PER_BATCH), 0, False),
        "one step off": (ahead(1), 1, True),
        "at most 4 off": (ahead(4), 4, True),
        "at most 4 off, partial rollouts": (ahead(4), 4, False),
    }
    logging.getLogger("llmrl").setLevel(logging.ERROR)  # hide the warnings about deaths, which are intended
    medians = {}
    for name, way in ways.items():
        medians[name] = run_in_virtual_time(simulate(*way))
        speed = medians[name]["rollouts_per_s"] / medians["synchronous"]["rollouts_per_s"]
        medians[name] = {"speed": speed, **medians[name]}
    table = Table(title=f"a cluster of {NUM_REPLICAS} replicas, simulated")
    for column in ("way", *next(iter(medians.values()))):
        table.add_column(column.replace("_", " "), justify="left" if column == "way" else "right")
    for name, figures in medians.items():
        table.add_row(name, *(f"{figure:.3g}" for figure in figures.values()))
    Console(width=120).print(table)
    ratio = medians["at most 4 off, partial rollouts"]["speed"]
    return {
        "name": "staleness_simulation",
        "ratio": ratio,
        "ratio_of": "rollouts per second, at most 4 versions ahead, to those of synchronous collection",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "medians": medians,
    }
