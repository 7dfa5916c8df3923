"""Reward functions and rubrics."""

from __future__ import annotations

import asyncio
from fractions import Fraction

import numpy as np
import pytest
import torch

from llmrl._utils.asynchronous import run_sync
from llmrl.data import RolloutStatus
from llmrl.rewards import RewardFn, RewardInput, Rubric, Score, UnknownRewardInput
from llmrl.testing import run_in_virtual_time

ROLLOUT = RewardInput(
    ({"role": "user", "content": "q"}, {"role": "assistant", "content": "15"}), {"answer": "15", "level": 2}
)


def one(completion):
    return 1.0


async def slow(completion):
    await asyncio.sleep(30)


def broken(completion):
    return {}["absent"]


def test_functions_read_completion_messages_status_and_columns_by_name():
    seen = {}

    def look(completion, messages, status, answer, level, absent=None):
        seen.update(completion=completion, n=len(messages), status=status, answer=answer, level=level, absent=absent)
        return 1

    assert run_sync(Rubric(look).score(ROLLOUT)).reward == 1.0
    assert seen == {
        "completion": "15", "n": 2, "status": RolloutStatus.COMPLETED, "answer": "15", "level": 2, "absent": None,
    }  # fmt: skip


def test_a_parameter_that_names_nothing_is_the_authors_error():
    with pytest.raises(UnknownRewardInput, match="anwser"):
        run_sync(Rubric(RewardFn(lambda anwser: 0, name="typo")).score(ROLLOUT))


def test_weights_are_normalised_and_raw_values_kept():
    rubric = Rubric(RewardFn(one, weight=3), RewardFn(lambda completion: -1.0, name="other", weight=1))
    assert run_sync(rubric.score(ROLLOUT)) == Score(0.5, {"one": 1.0, "other": -1.0})


@pytest.mark.parametrize(
    ("fns", "named"),
    [
        ([], "empty"),
        ([one, one], "unique"),
        ([RewardFn(one, weight=0)], "positive sum"),
    ],
)
def test_rubrics_that_cannot_score_are_refused(fns, named):
    with pytest.raises(ValueError, match=named):
        Rubric(*fns)


def test_negative_weight_and_namelessness_are_refused():
    with pytest.raises(ValueError, match="non-negative"):
        RewardFn(one, weight=-1)
    with pytest.raises(ValueError, match="name is needed"):
        RewardFn(lambda completion: 0)


def test_truncated_and_failed_rollouts_get_their_fixed_reward_or_are_left_out():
    truncated = RewardInput(ROLLOUT.messages, status=RolloutStatus.TRUNCATED)
    failed = RewardInput(ROLLOUT.messages, status=RolloutStatus.ERROR, reason="engine_error")
    assert run_sync(Rubric(one).score(truncated)) == Score(1.0, {"one": 1.0})
    assert run_sync(Rubric(one, truncation_reward=-1).score(truncated)).reward == -1
    assert not run_sync(Rubric(one).score(failed)).is_scored
    assert run_sync(Rubric(one, error_reward=-2).score(failed)) == Score(-2, error="engine_error")


@pytest.mark.parametrize("function", [broken, slow])
def test_a_failing_or_hanging_function_leaves_the_rollout_unscored_with_its_error(function):
    score = run_sync(Rubric(one, function, timeout_seconds=0.05).score(ROLLOUT))
    assert not score.is_scored
    assert score.error.split(":")[0] in ("KeyError", "TimeoutError")


BAD_SCORES = [float("nan"), float("inf"), -float("inf"), 10**400, 1e39, None, "1.0", [1.0], {}, 1j]


def returning(value, *, is_async=False):
    def bad(completion):
        return value

    async def judge(completion):
        return value

    return judge if is_async else bad


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("value", [*BAD_SCORES, torch.ones(2), torch.tensor(float("nan")), np.ones(2)], ids=repr)
def test_a_score_that_is_no_finite_number_is_a_failed_one_with_name_file_and_line(value, is_async, caplog):
    function = returning(value, is_async=is_async)
    rubric = Rubric(one, function)
    scores = [run_sync(rubric.score(ROLLOUT)) for _ in range(3)]
    where = f"reward function {function.__name__!r} ({__file__}:{function.__code__.co_firstlineno})"
    assert all(not score.is_scored and score.reward == 0.0 and where in score.error for score in scores)
    assert [where in record.message for record in caplog.records] == [True]  # told once, not at each rollout
    assert run_sync(Rubric(function, error_reward=-1.0).score(ROLLOUT)).reward == -1.0


@pytest.mark.parametrize(
    "value", [True, 2, 0.5, np.float32(0.25), torch.tensor(3.0), torch.tensor([3]), Fraction(1, 2)]
)
def test_numbers_of_any_kind_are_scores(value):
    score = run_sync(Rubric(returning(value)).score(ROLLOUT))
    assert score.is_scored and type(score.reward) is float and score.reward == float(value)


def test_an_error_names_the_function_and_the_line_that_raised():
    error = run_sync(Rubric(RewardFn(broken)).score(ROLLOUT)).error
    assert error.endswith(f"reward function 'broken' ({__file__}:{broken.__code__.co_firstlineno + 1})")


def test_a_judge_that_takes_too_long_is_named():
    error = run_sync(Rubric(one, slow, timeout_seconds=0.05).score(ROLLOUT)).error
    assert error.startswith("TimeoutError") and "'slow'" in error and "'one'" not in error


@pytest.mark.parametrize(
    "arguments", [{"reward": float("nan")}, {"reward": "1"}, {"reward": 1.0, "breakdown": {"a": None}}]
)
def test_a_score_made_by_hand_is_finite_too(arguments):
    with pytest.raises((TypeError, ValueError), match=r"reward|breakdown\['a'\]"):
        Score(**arguments)


def test_fixed_rewards_weights_limits_and_parameters_without_a_name_are_refused():
    for name in ("truncation_reward", "error_reward"):
        with pytest.raises(ValueError, match=name):
            Rubric(one, **{name: float("nan")})
    for seconds in (0, -1):
        with pytest.raises(ValueError, match="timeout_seconds must be positive"):
            Rubric(one, timeout_seconds=seconds)
    with pytest.raises(ValueError, match="finite"):
        RewardFn(one, weight=float("inf"))
    with pytest.raises(TypeError, match=r"\['obj'\] by position"):
        RewardFn(len)


def test_async_functions_are_awaited_together():
    async def nap(completion):
        await asyncio.sleep(0.05)
        return 1.0

    async def timed():
        loop = asyncio.get_running_loop()
        started = loop.time()
        await Rubric(*(RewardFn(nap, name=f"nap{i}") for i in range(20))).score(ROLLOUT)
        return loop.time() - started

    assert run_in_virtual_time(timed()) == pytest.approx(0.05)


def test_group_scoring_is_an_override():
    class Longest(Rubric):
        async def score_group(self, rollouts):
            longest = max(len(r.completion) for r in rollouts)
            return [Score(float(len(r.completion) == longest)) for r in rollouts]

    assert Longest(one).is_group_scored and not Rubric(one).is_group_scored
    short = RewardInput(({"role": "assistant", "content": "5"},))
    assert [s.reward for s in run_sync(Longest(one).score_group([ROLLOUT, short]))] == [1.0, 0.0]
