"""Tokens per second of vLLM with memory for a dozen contexts: automatic and fixed numbers of rollouts in flight."""

from __future__ import annotations

import time
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.collector_efficiency import FixedLength
from benchmarks.conversations import make_env

NUM_TURNS = 4
FIXED_NUMBERS = (12, 48)
GROUPS_PER_BATCH, GROUP_SIZE = 4, 4
NUM_BATCHES, NUM_WARM_BATCHES, NUM_SEARCHED_BATCHES = 3, 1, 10
"""Numbers of measured batches, of warm-up batches, and of warm-up batches while the number in flight is searched."""
MEMORY_BYTES = 144 << 20
"""Memory for keys and values: 3,200 tokens of the embedded model in float32, a dozen complete conversations."""
GOAL = 0.95


class Pressed(FixedLength):
    """An engine that also reports its load."""

    def take_load(self, reader: str) -> Any:
        return self.engine.take_load(reader)


def collect(engine: Any, tokenizer: Any, in_flight: int | Literal["auto"]) -> dict[str, float]:
    """Return tokens per second, preemptions per rollout, and the final number of rollouts in flight."""
    from llmrl.collectors import LLMCollector
    from llmrl.policies import LLMWrapperBase

    engine.reset_prefix_cache()
    num_before = NUM_SEARCHED_BATCHES if in_flight == "auto" else NUM_WARM_BATCHES
    with LLMCollector(
        make_env(NUM_TURNS, repeats=GROUP_SIZE),
        policy=LLMWrapperBase(Pressed(engine), tokenizer=tokenizer),
        groups_per_batch=GROUPS_PER_BATCH,
        max_staleness=num_before + NUM_BATCHES + 8,
        max_concurrent_rollouts=in_flight,
    ) as collector:
        for _ in range(num_before):
            collector.next()
        engine.take_load("benchmark")
        started, num_tokens, num_rollouts = time.perf_counter(), 0, 0
        for _ in range(NUM_BATCHES):
            collector.next()
            num_rollouts += len(collector.rollouts)
            num_tokens += sum(rollout.num_completion_tokens for rollout in collector.rollouts)
        seconds, load = time.perf_counter() - started, engine.take_load("benchmark")
        return {
            "tokens_per_s": num_tokens / seconds,
            "preemptions_per_rollout": load.num_preemptions / num_rollouts,
            "in_flight": collector.max_concurrent_rollouts,
        }


def run() -> dict[str, Any]:
    """Measure each number once, because each takes minutes."""
    from llmrl.engines import AsyncVLLM
    from llmrl.testing.embedded_model import ensure_embedded_model

    path = str(ensure_embedded_model())
    cases: tuple[int | Literal["auto"], ...] = (*FIXED_NUMBERS, "auto")
    with AsyncVLLM.from_pretrained(path, max_model_len=1024, kv_cache_memory=MEMORY_BYTES) as engine:
        tokenizer = engine.get_tokenizer()
        found = {}
        for case in cases:
            found[case] = collect(engine, tokenizer, case)
            print(f"{case} in flight: {found[case]}", flush=True)
    table = Table(title=f"Real vLLM, conversations of {NUM_TURNS} turns, {MEMORY_BYTES >> 20} MiB of keys and values")
    for column in ("setting", "in flight", "tokens per second", "preemptions per rollout"):
        table.add_column(column, justify="right")
    for case, one in found.items():
        figures = (f"{one['tokens_per_s']:,.0f}", f"{one['preemptions_per_rollout']:.2f}")
        table.add_row(str(case), f"{one['in_flight']:.0f}", *figures)
    Console().print(table)
    ratio = found["auto"]["tokens_per_s"] / max(found[number]["tokens_per_s"] for number in FIXED_NUMBERS)
    return {
        "name": "engine_pressure",
        "ratio": round(ratio, 3),
        "ratio_of": "tokens per second with the automatic number in flight to those with the best fixed number",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "medians": {f"{case}, {name}": round(value, 2) for case, one in found.items() for name, value in one.items()},
    }
