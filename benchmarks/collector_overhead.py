"""CPU microseconds per turn in the collectors of llmrl and TorchRL, with an engine that answers immediately.

Both the ratio and the growth must meet their goals. Most of the growth is Python's garbage collection, which traverses
the objects of all conversations: 77 us per turn with 8,192 conversations, and 17 us with 256.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.conversations import make_env, make_torchrl_env, make_torchrl_policy, torchrl_batches

NUM_TURNS = 4
SIZES = (16, 256, 1024, 8192)
COMPARED = 256
NUM_REPEATS = 3
GOAL = 0.1
GOAL_GROWTH = 1.1
"""Maximum growth of the cost per turn from 256 to 8,192 conversations in flight."""
ANSWER = "1 2 3 4<|im_end|>"


def ours(num_conversations: int, renderer: Any, *, num_rounds: int) -> float:
    """Return the CPU microseconds per turn of all threads, including training rows."""
    from llmrl.collectors import LLMCollector
    from llmrl.policies import LLMWrapperBase
    from llmrl.testing import ScriptedEngine

    engine = ScriptedEngine([renderer.encode(ANSWER)], record_requests=False)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(make_env(NUM_TURNS), policy=policy, groups_per_batch=num_conversations) as collector:
        if num_conversations <= COMPARED:
            collector.next()
        started = time.process_time()
        for _ in range(num_rounds):
            assert len(collector.next()) == num_conversations
        seconds = time.process_time() - started
    return seconds / (num_rounds * num_conversations * NUM_TURNS) * 1e6


def theirs(num_conversations: int, tokenizer: Any) -> float:
    """Return the CPU microseconds per turn of TorchRL's collector, vLLM wrapper and environment."""
    from tensordict import set_list_to_stack

    from llmrl.engines import Completion

    answer_ids = tokenizer(ANSWER, add_special_tokens=False)["input_ids"]

    def generate(prompts: list[list[int]]) -> list[Completion]:
        return [Completion(answer_ids, [-1.0] * len(answer_ids), [0] * len(answer_ids), "stop") for _ in prompts]

    with set_list_to_stack(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env = make_torchrl_env(NUM_TURNS, num_conversations, tokenizer)
        batches = torchrl_batches(env, make_torchrl_policy(generate, tokenizer), NUM_TURNS * num_conversations)
        started = time.process_time()
        assert next(batches).numel() == NUM_TURNS * num_conversations
        return (time.process_time() - started) / (NUM_TURNS * num_conversations) * 1e6


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    from transformers import AutoTokenizer

    from llmrl.rendering import make_renderer
    from llmrl.testing.embedded_model import ensure_embedded_model

    tokenizer = AutoTokenizer.from_pretrained(str(ensure_embedded_model()))
    renderer = make_renderer(tokenizer)
    ours(16, renderer, num_rounds=2)
    theirs(16, tokenizer)
    rows: list[dict[str, float]] = []
    for _ in range(NUM_REPEATS):
        row = {f"ours_{size}_us": ours(size, renderer, num_rounds=max(1, 512 // size)) for size in SIZES}
        rows.append({**row, f"torchrl_{COMPARED}_us": theirs(COMPARED, tokenizer)})
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratio = medians[f"ours_{COMPARED}_us"] / medians[f"torchrl_{COMPARED}_us"]
    growth = medians[f"ours_{SIZES[-1]}_us"] / medians[f"ours_{COMPARED}_us"]
    table = Table(title=f"CPU microseconds per turn, conversations of {NUM_TURNS} turns, median of {NUM_REPEATS}")
    table.add_column("conversations in flight")
    table.add_column("llmrl", justify="right")
    table.add_column("torchrl", justify="right")
    for size in SIZES:
        peer = f"{medians[f'torchrl_{size}_us']:,.0f}" if size == COMPARED else ""
        table.add_row(f"{size:,}", f"{medians[f'ours_{size}_us']:,.0f}", peer)
    table.add_row(f"growth from {COMPARED} to {SIZES[-1]:,}", f"{growth:.2f}", "")
    Console().print(table)
    return {
        "name": "collector_overhead",
        "ratio": ratio,
        "ratio_of": f"CPU time per turn in the collector to that of TorchRL's, {COMPARED} conversations in flight",
        "goal": GOAL,
        "met": ratio <= GOAL and growth <= GOAL_GROWTH,
        "medians": {**medians, "growth": growth, "goal_growth": GOAL_GROWTH},
    }
