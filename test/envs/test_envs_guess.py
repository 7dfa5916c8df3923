"""Guessing a number: what is said to a guess, and what bisection and guesses that ignore the hints are worth."""

from __future__ import annotations

import functools
import itertools
import re

import pytest

from llmrl.collectors import LLMCollector
from llmrl.data import ChatHistory
from llmrl.envs import GuessEnv, guess_problems, make_task_env
from llmrl.envs.chat import unlock_batch_size
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine

VALUES = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Of a number that is found at the first guess, the second, …"""


def mean_reward(renderer, say, *, highest=10):
    """Play every number once with a policy that says `say(number of the guess, lowest left, highest left)`."""

    def answer(prompt_ids):
        text = renderer.decode(prompt_ids)
        ranges = re.findall(r"from (\d+) to (\d+)", text)
        return renderer.encode(f"{say(len(ranges), *map(int, ranges[-1]))}<|im_end|>")

    policy = LLMWrapperBase(ScriptedEngine(answer), renderer=renderer, generate_kwargs={"max_new_tokens": 24})
    with LLMCollector(GuessEnv(highest=highest), policy=policy, groups_per_batch=highest) as collector:
        collector.next()
        assert len({one.columns["answer"] for one in collector.rollouts}) == highest
        assert {one.status.name for one in collector.rollouts} == {"COMPLETED"}
        return sum(one.reward for one in collector.rollouts) / highest


@functools.cache
def best(num_left, values=VALUES):
    """Sum of the rewards of the best way to find each of so many numbers, by trying every guess at every place."""
    if not num_left or not values:
        return 0.0
    return max(values[0] + best(k, values[1:]) + best(num_left - 1 - k, values[1:]) for k in range(num_left))


def test_bisection_is_the_best_and_five_guesses_without_hints_are_worth_less_than_half_of_it(renderer):
    bisected = mean_reward(renderer, lambda place, low, high: (low + high) // 2)
    assert bisected == pytest.approx(best(10) / 10) == pytest.approx(0.81)
    for sequence in ((1, 2, 3, 4, 5), (5, 3, 8, 2, 9), (5, 5, 5, 5, 5)):
        value = mean_reward(renderer, lambda place, low, high, sequence=sequence: sequence[place - 1])
        # Each number is found at its first place in the sequence, whatever was said in between.
        expected = sum(VALUES[sequence.index(number)] for number in set(sequence)) / 10
        assert value == pytest.approx(expected) and value <= 0.4
    assert sum(VALUES) / 10 == pytest.approx(0.4)  # no sequence has more than five numbers


def test_a_policy_that_looks_at_the_range_alone_passes_the_threshold(renderer):
    assert mean_reward(renderer, lambda place, low, high: low + (high - low + 1) // 3) > 0.6


@pytest.mark.parametrize("said", ["no idea", "5 or 6", "", "99999999999999"])
def test_what_is_no_number_costs_a_guess(renderer, said):
    value = mean_reward(renderer, lambda place, low, high: said if place == 1 else (low + high) // 2)
    assert value == pytest.approx(best(10, VALUES[1:]) / 10)


def test_hints_are_true_and_narrow_the_range():
    for answer, first, second in itertools.product((1, 4, 10), (0, 3, 4, 5, 12), (1, 4, 6, 10)):
        env = GuessEnv(num_envs=None, compute_reward=False)
        unlock_batch_size(env)
        data = env.reset()
        data["answer"] = answer
        low, high = 1, 10
        for guess in (first, second):
            prompt = data["history"].prompt
            data["history"] = ChatHistory(
                prompt=prompt, full=prompt.append({"role": "assistant", "content": str(guess)})
            )
            data = env.step_mdp(env.step(data))
            if guess == answer:
                assert data["history"].prompt.role[-1] == "assistant"
                break
            low, high = max(low, guess + 1) if guess < answer else low, min(high, guess - 1) if guess > answer else high
            side = "Higher" if guess < answer else "Lower"
            assert data["history"].prompt.content[-1] == f"{side}. Guess a number from {low} to {high}."


def test_every_number_is_a_game_and_wrong_options_are_refused():
    assert sorted(problem["answer"] for problem in guess_problems(7, seed=3)) == list(range(1, 8))
    assert make_task_env("guess", "test", highest=3).reset()[0]["history"].prompt.content[-1].endswith("from 1 to 3.")
    with pytest.raises(ValueError, match="at least 2"):
        guess_problems(1)
    with pytest.raises(ValueError, match="split"):
        make_task_env("guess", "validation")
    with pytest.raises(ValueError, match="input_mode must be"):
        make_task_env("guess", input_mode="tokens")
    with pytest.raises(ValueError, match="makes its own problems"):
        make_task_env("guess", data=[{"query": "?"}])
