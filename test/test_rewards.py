"""Reward functions and rubrics."""

from __future__ import annotations

import asyncio

import pytest

from llmrl.data import RolloutStatus, run_sync
from llmrl.rewards import RewardFn, Rubric, Score, ScoredRollout, UnknownRewardInput

ROLLOUT = ScoredRollout(
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
    truncated = ScoredRollout(ROLLOUT.messages, status=RolloutStatus.TRUNCATED)
    failed = ScoredRollout(ROLLOUT.messages, status=RolloutStatus.ERROR, reason="engine_error")
    assert run_sync(Rubric(one).score(truncated)) == Score(1.0, {"one": 1.0})
    assert run_sync(Rubric(one, truncation_reward=-1).score(truncated)).reward == -1
    assert not run_sync(Rubric(one).score(failed)).is_scored
    assert run_sync(Rubric(one, error_reward=-2).score(failed)) == Score(-2, error="engine_error")


@pytest.mark.parametrize("function", [broken, slow])
def test_a_failing_or_hanging_function_leaves_the_rollout_unscored_with_its_error(function):
    score = run_sync(Rubric(one, function, timeout_seconds=0.05).score(ROLLOUT))
    assert not score.is_scored
    assert score.error.split(":")[0] in ("KeyError", "TimeoutError")


def test_async_functions_are_awaited_together():
    async def nap(completion):
        await asyncio.sleep(0.05)
        return 1.0

    async def timed():
        loop = asyncio.get_running_loop()
        started = loop.time()
        await Rubric(*(RewardFn(nap, name=f"nap{i}") for i in range(20))).score(ROLLOUT)
        return loop.time() - started

    assert run_sync(timed()) < 0.5


def test_group_scoring_is_an_override():
    class Longest(Rubric):
        async def score_group(self, rollouts):
            longest = max(len(r.completion) for r in rollouts)
            return [Score(float(len(r.completion) == longest)) for r in rollouts]

    assert Longest(one).is_group_scored and not Rubric(one).is_group_scored
    short = ScoredRollout(({"role": "assistant", "content": "5"},))
    assert [s.reward for s in run_sync(Longest(one).score_group([ROLLOUT, short]))] == [1.0, 0.0]
