"""Completions that updates cut anywhere, and conversations that end between two steps."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

STOPS = ("END", "🦜🐦", "\n\n")
PIECES = ["E", "EN", "END", "ENDE", "D", "N", "ND", "🦜", "🐦", "🦜🐦", "\n", "a\n", "\n\n\n", "y", "z", " w", "b"]


class CutEngine(ScriptedEngine):
    """Ends some requests before their time, as an update that aborts does."""

    def __init__(self, random_cuts, **kwargs):
        super().__init__(**kwargs)
        self.random, self.num_cut = random_cuts, 0

    async def generate(self, prompt_ids, sampling, **kwargs):
        completion = await super().generate(prompt_ids, sampling, **kwargs)
        num_left = self.random.randint(0, len(completion.token_ids))
        if self.random.random() < 0.4 or num_left == 0:
            return completion
        self.num_cut += 1
        kept = {name: getattr(completion, name)[:num_left] for name in ("token_ids", "log_probs", "versions")}
        return replace(completion, **kept, finish_reason="abort", stop_string=None)


def uninterrupted(token_ids, decode, budget):
    """What an engine gives that samples token after token and looks at the text each time, in a plain loop."""
    for length in range(1, budget + 1):
        if any(stop in decode(token_ids[:length]) for stop in STOPS):
            return token_ids[:length], "stop"
    return token_ids[:budget], "length"


def test_a_stop_string_is_seen_wherever_an_update_cuts_it(renderer):
    randomly, budget = random.Random(0), 12
    rows = [{"query": f"number {index}"} for index in range(150)]
    opening = {
        tuple(renderer.render([{"role": "user", "content": row["query"]}], add_generation_prompt=True)): [
            token for piece in [*randomly.choices(PIECES, k=8), *["y"] * budget] for token in renderer.encode(piece)
        ]
        for row in rows
    }

    def script(prompt):
        (start,) = (start for start in opening if tuple(prompt[: len(start)]) == start)
        return opening[start][len(prompt) - len(start) :]

    engine = CutEngine(randomly, script=script, decode=renderer.decode)
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"stop": STOPS, "max_new_tokens": budget})
    env = DatasetChatEnv(rows).append_transform(RubricReward(RewardFn(lambda completion: 1.0, name="one")))
    with LLMCollector(env, policy=policy, dialog_turns_per_batch=1, limits=RolloutLimits(max_turns=1)) as collector:
        rollouts = collector.play(len(rows))
    assert engine.num_cut > len(rows) // 2
    reasons = []
    for rollout, (start, token_ids) in zip(rollouts, opening.items(), strict=True):
        (turn,) = rollout.conversation.turns
        expected, reason = uninterrupted(token_ids, renderer.decode, budget)
        assert turn.context_ids == list(start) and turn.completion_ids == expected
        assert rollout.reason == ("length" if reason == "length" else "")
        reasons.append(reason)
    assert min(reasons.count("stop"), reasons.count("length")) > 3  # both are met


def test_stop_strings_need_what_sees_them_cut(renderer):
    policy = LLMWrapperBase(ScriptedEngine([[1]]), input_mode="tokens", generate_kwargs={"stop": ["END"]})
    with pytest.raises(ValueError, match="stop strings but no renderer"):
        LLMCollector(DatasetChatEnv([{"query": [1]}], input_mode="tokens"), policy=policy, dialog_turns_per_batch=1)


class Chatter(MessageEnv):
    """Never ends by itself."""

    def __init__(self, item):
        self.query = item["query"]

    async def init(self):
        return [{"role": "user", "content": self.query}]

    async def step(self, message):
        return MessageStep([{"role": "user", "content": "and again, and again, and again"}])


@pytest.mark.parametrize(
    ("script", "limits", "reason"),
    [
        (["1<|im_end|>"], {"max_prompt_tokens": 80}, "prompt_too_long"),
        (["1<|im_end|>"], {"rollout_timeout_seconds": 600}, "timeout"),
        (["1<|im_end|>"], {"max_turns": 2}, "max_turns"),
    ],
)
def test_a_conversation_that_ends_between_two_steps_is_done(renderer, clock, script, limits, reason):
    def latency_s(prompt_ids, token_ids):
        if reason != "timeout" or len(engine.requests) < 3:
            return 0.05
        clock.pass_limit(600)
        return math.inf

    engine = ScriptedEngine(script, encode=renderer.encode, latency_s=latency_s)
    env = MessageChatEnv(Chatter, [{"query": "go"}] * 2)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(
        env,
        policy=policy,
        yield_completed_trajectories=True,
        max_concurrent_rollouts=1,
        limits=RolloutLimits(**limits),
    ) as collector:
        trajectory = next(iter(collector))
        (rollout,) = collector.rollouts
    assert rollout.reason == reason and rollout.status is not RolloutStatus.COMPLETED
    *before, last = trajectory["next", "done"].flatten().tolist()
    assert last and not any(before) and len(trajectory) == len(rollout.steps)
    assert trajectory["next", "truncated"].flatten().tolist() == trajectory["next", "done"].flatten().tolist()
    assert not trajectory["next", "terminated"].any()
