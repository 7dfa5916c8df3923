"""Fixture that plays an environment without a model: a function returns the answers."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from llmrl import LLMCollector, RolloutLimits, ensure_embedded_model, vLLMWrapper
from llmrl.testing import ScriptedEngine


@pytest.fixture
def played():
    """Return `played(env, say)`, which returns rollouts with `say(prompt)` as the model's answers."""
    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())

    def play(env, say, num_rollouts=1):
        engine = ScriptedEngine(lambda ids: f"{say(tokenizer.decode(ids))}<|im_end|>", encode=tokenizer.encode)
        policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 64})
        limits = RolloutLimits(max_turns=8)
        with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
            return collector.play(num_rollouts)

    return play
