"""Environments with public methods that are tools: opened with their row, scored by themselves, always closed."""

from __future__ import annotations

import asyncio
import functools
import json
from collections import Counter

import pytest
from tool_classes import Increment
from waiting import patient

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import ToolEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine


class GuessingGame:
    """As a user of TRL writes one: `reset(**row)` says something, methods are tools, the reward is kept."""

    events: Counter = Counter()  # noqa: RUF012
    loops: set = set()  # noqa: RUF012

    def __init__(self, step=1.0):
        self.step, self.reward = step, 0.0
        self.events["made"] += 1

    async def reset(self, secret, **kwargs):
        self.loops.add(asyncio.get_running_loop())
        self.secret = secret
        if secret == 13:
            raise ValueError("no thirteen")
        return None if secret == 0 else f" It is below {secret + 10}."

    async def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: what you think.
        """
        self.loops.add(asyncio.get_running_loop())
        self.reward += self.step * (number == self.secret)
        return "right" if number == self.secret else "wrong"

    def get_reward(self):
        if self.secret == 99:
            raise RuntimeError("cannot say")
        return self.reward

    async def close(self):
        self.loops.add(asyncio.get_running_loop())
        self.events["closed"] += 1


@pytest.fixture(autouse=True)
def nothing_counted():
    GuessingGame.events.clear()
    GuessingGame.loops.clear()


def play(renderer, env, num_rollouts, *, guesses=(4,), **limits):
    def answer(prompt_ids):
        text = renderer.decode(prompt_ids)
        num_answered = text.count("<|im_start|>tool")
        if num_answered == len(guesses):
            return "Done<|im_end|>"
        call = {"name": "guess", "arguments": {"number": guesses[num_answered]}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"

    policy = LLMWrapperBase(ScriptedEngine(answer, encode=renderer.encode), renderer=renderer)
    limits = RolloutLimits(**{"max_turns": 4} | limits)
    with LLMCollector(env, policy=policy, groups_per_batch=1, limits=limits) as collector:
        return collector.play(num_rollouts)


def rows(*secrets):
    return [{"prompt": "Guess.", "secret": secret} for secret in secrets]


def test_an_instance_plays_one_conversation_and_scores_it(renderer):
    rollouts = play(renderer, ToolEnv(GuessingGame, rows(4, 5), repeats=2), 4)
    assert [one.reward for one in rollouts] == [1, 1, 0, 0] and all(one.is_scored for one in rollouts)
    assert [one.messages[0]["content"] for one in rollouts] == [
        f"Guess. It is below {secret + 10}." for secret in (4, 4, 5, 5)
    ]
    assert [[one["content"] for one in rollout.messages if one["role"] == "tool"] for rollout in rollouts] == [
        ["right"], ["right"], ["wrong"], ["wrong"]
    ]  # fmt: skip
    assert all(one.status is RolloutStatus.COMPLETED and one.tool_calls == {"answered": 1} for one in rollouts)
    assert GuessingGame.events == {"made": 4, "closed": 4}
    assert len(GuessingGame.loops) == 1  # what reset opens, tools use and close closes


def test_conversations_that_fail_or_are_cut_are_closed_and_scored_as_far_as_they_got(renderer):
    rollouts = play(renderer, ToolEnv(GuessingGame, rows(13, 99, 4), repeats=1), 3, guesses=(4, 4, 4), max_turns=2)
    failed, unscored, cut = rollouts
    assert failed.status is RolloutStatus.ERROR and "no thirteen" in failed.error
    assert not unscored.is_scored and "cannot say" in unscored.error
    assert cut.status is RolloutStatus.TRUNCATED and cut.reward == 2 and cut.is_scored
    assert GuessingGame.events == {"made": 3, "closed": 3}


class NeverBegins(GuessingGame):
    async def reset(self, secret):
        await asyncio.sleep(3600 if secret else 0)
        return await super().reset(secret)


@pytest.mark.slow
@pytest.mark.parametrize("rubric", [None, Rubric(RewardFn(lambda completion: 1.0, name="one"))], ids=["own", "rubric"])
def test_a_conversation_that_is_cut_while_it_is_opened_has_no_score_and_says_so(renderer, rubric):
    def attempt(limit):
        env = ToolEnv(NeverBegins, rows(1, 0), repeats=1, rubric=rubric)
        cut, other = play(renderer, env, 2, rollout_timeout_seconds=limit)
        return cut if other.is_scored and not other.error else None

    cut = patient(attempt)
    assert cut.status is RolloutStatus.TRUNCATED and cut.reason == "timeout" and not cut.is_scored
    assert cut.error == "The time limit of the rollout expired while its environment opened it."


def test_messages_a_system_prompt_and_a_factory_with_arguments(renderer):
    few_shots = [{"role": "user", "content": "Guess."}, {"role": "assistant", "content": "7"}]
    data = [
        {"prompt": [*few_shots, {"role": "user", "content": "Again."}], "secret": 4},
        {"prompt": [{"role": "system", "content": "Play."}], "secret": 4},
    ]
    env = ToolEnv(functools.partial(GuessingGame, step=0.5), data)
    first, second = play(renderer, env, 2)
    assert [one["content"] for one in first.messages[:3]] == ["Guess.", "7", "Again. It is below 14."]
    assert [one["role"] for one in second.messages[:2]] == ["system", "user"]
    assert first.reward == 0.5
    quiet = ToolEnv(GuessingGame, [{"query": "Hm.", "secret": 0}], system_prompt="Short.")
    assert quiet.reset()["history"].prompt.content == ["Short.", "Hm."]


def test_without_a_dataset_the_class_sets_the_task(renderer):
    class Silent(Increment):
        def reset(self, **kwargs):
            super().reset()

    rollouts = play(renderer, ToolEnv(Increment, repeats=2), 4, guesses=(1, 3))
    assert [one.reward for one in rollouts] == [1.0] * 4
    assert [message["content"] for message in rollouts[3].messages if message["role"] in ("user", "tool")] == [
        "Increment the counter by 4.", "1", "4"
    ]  # fmt: skip
    [silent] = play(renderer, ToolEnv(Silent, system_prompt="Play."), 1)
    assert silent.status is RolloutStatus.COMPLETED  # a system prompt is a prompt
    [silent] = play(renderer, ToolEnv(Silent), 1)
    assert silent.status is RolloutStatus.ERROR and "a text where there is no prompt" in silent.error


def test_a_rubric_scores_in_its_place(renderer):
    def closeness(guessing_game, secret):
        return guessing_game.reward / 2 + (secret == 4) / 4

    env = ToolEnv(GuessingGame, rows(4), rubric=Rubric(RewardFn(closeness)))
    assert [one.reward for one in play(renderer, env, 1)] == [0.75]


def test_what_is_no_environment_is_refused():
    class Silent:
        def look(self) -> str:
            """Look."""
            return ""

    class Hintless:
        def look(self, where) -> str:
            """Look."""
            return where

        def get_reward(self):
            return 0.0

    with pytest.raises(ValueError, match="no get_reward"):
        ToolEnv(Silent, rows(1))
    with pytest.raises(TypeError, match="type hint"):
        ToolEnv(Hintless, rows(1))
    with pytest.raises(TypeError, match="must be a class"):
        ToolEnv(lambda: GuessingGame(), rows(1))
    with pytest.raises(ValueError, match="neither 'prompt' nor 'query'"):
        ToolEnv(GuessingGame, [{"question": "?"}])
    with pytest.raises(TypeError, match="group_size"):
        ToolEnv(GuessingGame, rows(1), group_size=2)
