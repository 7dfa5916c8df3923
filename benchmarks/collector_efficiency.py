"""Tokens per second of the collector on vLLM, and of the bare engine with the same prompts and lengths."""

from __future__ import annotations

import asyncio
import statistics
import time
import warnings
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.conversations import make_env, make_torchrl_env, make_torchrl_policy, torchrl_batches

NUM_CONVERSATIONS = 64
MAX_NEW_TOKENS = 48
NUM_REPEATS = 5
TURNS = (1, 4)
GOALS = {1: 0.95, 4: 0.90}


class FixedLength:
    """An engine with completions of exactly `MAX_NEW_TOKENS` tokens, which count as finished, not as truncated."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.max_model_len, self.vocab_size = engine, engine.max_model_len, engine.vocab_size

    @property
    def policy_version(self) -> int:
        return self.engine.policy_version

    async def generate(self, prompt_ids: Any, sampling: Any, **ids: Any) -> Any:
        sampling = sampling.with_changes(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, stop_token_ids=())
        return replace(await self.engine.generate(prompt_ids, sampling, **ids), finish_reason="stop")


Contexts = list[list[list[int]]]
"""Token ids between the previous completion and the completion, for each turn of each conversation."""


def bare(engine: Any, contexts: Contexts) -> float:
    """Return the tokens per second of vLLM's own `AsyncLLM`."""
    from llmrl.engines import SamplingConfig
    from llmrl.engines.vllm.requests import sampling_params

    params = sampling_params(SamplingConfig(max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True), MAX_NEW_TOKENS)
    run = time.perf_counter_ns()

    async def converse(index: int, turns: list[list[int]]) -> int:
        held: list[int] = []
        num_tokens = 0
        for turn, context_ids in enumerate(turns):
            held += context_ids
            prompt: Any = {"type": "token", "prompt_token_ids": list(held)}
            async for output in engine.llm.generate(prompt, params, f"bare-{run}-{index}-{turn}"):
                completion_ids = list(output.outputs[0].token_ids)
            held += completion_ids
            num_tokens += len(completion_ids)
        return num_tokens

    async def converse_all() -> int:
        return sum(await asyncio.gather(*(converse(index, turns) for index, turns in enumerate(contexts))))

    engine.reset_prefix_cache()
    started = time.perf_counter()
    num_tokens = engine._background.run(converse_all())
    return num_tokens / (time.perf_counter() - started)


def ours(engine: Any, tokenizer: Any, num_turns: int) -> tuple[float, Contexts]:
    """Return the tokens per second of the collector, including training rows, and the contexts of each conversation."""
    from llmrl.collectors import LLMCollector
    from llmrl.policies import LLMWrapperBase

    policy = LLMWrapperBase(FixedLength(engine), tokenizer=tokenizer)
    engine.reset_prefix_cache()
    with LLMCollector(make_env(num_turns), policy=policy, groups_per_batch=NUM_CONVERSATIONS) as collector:
        started = time.perf_counter()
        collector.next()
        seconds = time.perf_counter() - started
        rollouts = collector.rollouts
    assert all(rollout.num_turns == num_turns for rollout in rollouts)
    contexts = [[list(node.context_ids) for node in rollout.conversation.turns] for rollout in rollouts]
    return sum(rollout.num_completion_tokens for rollout in rollouts) / seconds, contexts


def torchrl(engine: Any, tokenizer: Any, num_turns: int) -> float:
    """Return the tokens per second of TorchRL's collector on the same engine."""
    from tensordict import set_list_to_stack

    from llmrl.engines import SamplingConfig

    fixed = FixedLength(engine)

    def generate(prompts: list[list[int]]) -> list[Any]:
        async def generate_all() -> list[Any]:
            return list(await asyncio.gather(*(fixed.generate(ids, SamplingConfig()) for ids in prompts)))

        return asyncio.run(generate_all())

    engine.reset_prefix_cache()
    num_steps = NUM_CONVERSATIONS * num_turns
    with set_list_to_stack(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        policy = make_torchrl_policy(generate, tokenizer)
        batches = torchrl_batches(make_torchrl_env(num_turns, NUM_CONVERSATIONS, tokenizer), policy, num_steps)
        started = time.perf_counter()
        assert next(batches).numel() == num_steps
        return num_steps * MAX_NEW_TOKENS / (time.perf_counter() - started)


def run() -> dict[str, Any]:
    """Measure alternately, so that a disturbance of the machine affects all cases alike."""
    from llmrl.engines import AsyncVLLM
    from llmrl.testing.embedded_model import ensure_embedded_model

    rows: list[dict[str, float]] = []
    with AsyncVLLM.from_pretrained(str(ensure_embedded_model()), max_model_len=2048, kv_cache_memory=1 << 30) as engine:
        tokenizer = engine.get_tokenizer()
        for num_turns in TURNS:
            ours(engine, tokenizer, num_turns)
        for _ in range(NUM_REPEATS):
            row = {}
            for num_turns in TURNS:
                row[f"collector_{num_turns}_turns"], contexts = ours(engine, tokenizer, num_turns)
                row[f"bare_{num_turns}_turns"] = bare(engine, contexts)
                row[f"torchrl_{num_turns}_turns"] = torchrl(engine, tokenizer, num_turns)
            rows.append(row)
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    # The median of the ratios of each repetition: a disturbance of the machine affects both of its measurements.
    ratios = {
        turns: statistics.median(row[f"collector_{turns}_turns"] / row[f"bare_{turns}_turns"] for row in rows)
        for turns in TURNS
    }
    table = Table(title=f"Tokens per second, {NUM_CONVERSATIONS} conversations, median of {NUM_REPEATS}")
    for column in ("turns", "bare AsyncLLM", "llmrl", "torchrl", "llmrl / bare", "goal"):
        table.add_column(column, justify="right")
    for turns in TURNS:
        speeds = [f"{medians[f'{who}_{turns}_turns']:,.0f}" for who in ("bare", "collector", "torchrl")]
        table.add_row(str(turns), *speeds, f"{ratios[turns]:.3f}", f"{GOALS[turns]:.2f}")
    Console().print(table)
    return {
        "name": "collector_efficiency",
        "ratio": ratios[4],
        "ratio_of": "tokens per second of the collector to those of the bare engine, 4 turns and an instant tool",
        "goal": GOALS[4],
        "met": all(ratios[turns] >= GOALS[turns] for turns in TURNS),
        "medians": {**medians, **{f"ratio_{turns}_turns": ratio for turns, ratio in ratios.items()}},
    }
