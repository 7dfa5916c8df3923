"""`Rubric`: a weighted mean of reward functions, with a breakdown."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

from llmrl._utils.arguments import check_positive
from llmrl._utils.failure import describe, guarded
from llmrl._utils.numbers import finite_number
from llmrl._utils.spans import span
from llmrl.data import RolloutStatus
from llmrl.rewards.reward import RewardFn, RewardInput, UnknownRewardInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Score:
    """A rollout's reward; TypeError or ValueError is raised unless its numbers are finite."""

    reward: float
    """The weighted mean; 0 if the rollout was not scored."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Raw value of each reward function."""
    is_scored: bool = True
    """Whether the rollout counts in its batch and baseline."""
    error: str = ""
    """Reason why scoring failed, if it did."""
    reason: str = ""
    """`StopReason` of a rollout that its environment ended early; otherwise empty."""

    def __post_init__(self) -> None:
        finite_number(self.reward, "reward")
        for name, value in self.breakdown.items():
            finite_number(value, f"breakdown[{name!r}]")


class Rubric:
    """Scores rollouts with named, weighted reward functions.

    The reward is `sum(weight * raw) / sum(weight)`; the raw values are the breakdown. To score the
    rollouts of a group together (for example pairwise), override `score_group`.

    If a function raises, exceeds the time limit or returns no finite number, its rollout is not scored, and the error
    contains the function's file and line. The first failure of each function is logged.

    Args:
        reward_fns: `RewardFn`s, or plain functions (weight 1).
        truncation_reward: reward of truncated rollouts; None scores them like others.
        error_reward: reward of failed rollouts; None leaves them unscored.
        timeout_seconds: time limit of scoring one rollout.

    Raises ValueError if functions are missing or share a name, or if weights, fixed rewards or the
    time limit are invalid.

    Example:
        >>> from llmrl._utils.asynchronous import run_sync
        >>> rubric = Rubric(RewardFn(lambda completion: 1.0, name="right", weight=3),
        ...                 RewardFn(lambda completion: 0.0, name="short"))
        >>> run_sync(rubric.score(RewardInput(({"role": "assistant", "content": "15"},))))
        Score(reward=0.75, breakdown={'right': 1.0, 'short': 0.0}, is_scored=True, error='', reason='')
    """

    def __init__(
        self,
        *reward_fns: RewardFn | Callable[..., float | Awaitable[float]],
        truncation_reward: float | None = None,
        error_reward: float | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self.reward_fns = [fn if isinstance(fn, RewardFn) else RewardFn(fn) for fn in reward_fns]
        if not self.reward_fns:
            raise ValueError("reward_fns is empty; a rubric needs at least one reward function.")
        if doubled := _doubled(self.names):
            raise ValueError(f"reward_fns must have unique names, got {doubled} more than once; pass name=.")
        self._total_weight = sum(fn.weight for fn in self.reward_fns)
        if not self._total_weight > 0:
            raise ValueError(f"the weights of {self.names} must have a positive sum, got {self._total_weight}.")
        check_positive(timeout_seconds=timeout_seconds)
        for name, value in (("truncation_reward", truncation_reward), ("error_reward", error_reward)):
            if value is not None:
                finite_number(value, name)
        self.truncation_reward = truncation_reward
        self.error_reward = error_reward
        self.timeout_seconds = timeout_seconds
        self._logged: set[str] = set()

    @property
    def names(self) -> list[str]:
        """Names of the reward functions, in order."""
        return [fn.name for fn in self.reward_fns]

    @property
    def is_async(self) -> bool:
        """Whether a reward function is async, such as a judge."""
        return any(fn.is_async for fn in self.reward_fns)

    @property
    def is_group_scored(self) -> bool:
        """Whether the rollouts of a group are scored together, once all have finished."""
        return type(self).score_group is not Rubric.score_group

    @property
    def is_left_to_collectors(self) -> bool:
        """Whether a collector, instead of the environment's step, runs this rubric."""
        return self.is_async or self.is_group_scored

    def check_inputs(self, available: Collection[str]) -> None:
        """Raise UnknownRewardInput if a function needs an input that is not available."""
        for fn in self.reward_fns:
            fn.check_inputs(available)

    async def score(self, rollout: RewardInput) -> Score:
        """Score one finished rollout; an error of a reward function is stored in the score."""
        if rollout.status is RolloutStatus.TRUNCATED and self.truncation_reward is not None:
            return Score(self.truncation_reward)
        if rollout.status in (RolloutStatus.ERROR, RolloutStatus.ABORTED):
            return self.failed(rollout.reason)
        scoring = (guarded(fn.score(rollout)) for fn in self.reward_fns)
        try:
            async with asyncio.timeout(self.timeout_seconds):
                results = await asyncio.gather(*scoring, return_exceptions=True)
        except TimeoutError:
            return self.failed(f"TimeoutError: scoring took more than {self.timeout_seconds} s: {self.located()}.")
        raw: dict[str, float] = {}
        for fn, result in zip(self.reward_fns, results, strict=True):
            if isinstance(result, UnknownRewardInput):
                raise result
            if isinstance(result, BaseException):
                return self._failure_of(fn, result)
            raw[fn.name] = result
        return Score(sum(fn.weight * raw[fn.name] for fn in self.reward_fns) / self._total_weight, raw)

    def _failure_of(self, fn: RewardFn, error: BaseException) -> Score:
        text = f"{describe(error)}; {fn.located(error)}"
        if fn.name not in self._logged:
            self._logged.add(fn.name)
            logger.warning("A rollout could not be scored, and later ones may fail, too: %s", text)
        return self.failed(text)

    async def score_group(self, rollouts: Sequence[RewardInput]) -> list[Score]:
        """Score the rollouts of one group, in order; override to compare them with each other."""
        return list(await asyncio.gather(*(self.score(rollout) for rollout in rollouts)))

    def located(self) -> str:
        """Return the names, files and lines of the async functions, which a time limit can end."""
        return ", ".join(fn.located() for fn in self.reward_fns if fn.is_async)

    def failed(self, error: str) -> Score:
        """Return the score of a rollout that failed or could not be scored."""
        if self.error_reward is None:
            return Score(0.0, is_scored=False, error=error)
        return Score(self.error_reward, error=error)


class JointRubric(Rubric):
    """Several rubrics of one environment: their rewards are summed and their breakdowns merged.

    If one of them fails, the rollout is not scored. Each keeps its own time limit. ValueError is
    raised if two reward functions have the same name.
    """

    def __init__(self, rubrics: Sequence[Rubric]) -> None:
        self.rubrics = list(rubrics)
        self.reward_fns = [fn for rubric in self.rubrics for fn in rubric.reward_fns]
        if doubled := _doubled(self.names):
            raise ValueError(
                f"the environment's rubrics have several reward functions of the names {doubled}; give each its own, "
                "by RewardFn(function, name=...), so that the breakdown distinguishes them."
            )
        limits = [rubric.timeout_seconds for rubric in self.rubrics]
        self.timeout_seconds = None if None in limits else sum(limit for limit in limits if limit is not None)

    @property
    def is_async(self) -> bool:
        """Whether one of the rubrics is async."""
        return any(rubric.is_async for rubric in self.rubrics)

    @property
    def is_group_scored(self) -> bool:
        """Whether one of the rubrics scores groups."""
        return any(rubric.is_group_scored for rubric in self.rubrics)

    async def score(self, rollout: RewardInput) -> Score:
        """Score one finished rollout with all rubrics."""
        return _sum(await asyncio.gather(*(rubric.score(rollout) for rubric in self.rubrics)))

    async def score_group(self, rollouts: Sequence[RewardInput]) -> list[Score]:
        """Score the rollouts of one group with all rubrics."""
        by_rubric = await asyncio.gather(*(rubric.score_group(rollouts) for rubric in self.rubrics))
        return [_sum(scores) for scores in zip(*by_rubric, strict=True)]

    def failed(self, error: str) -> Score:
        """Return the score of a rollout that failed or could not be scored."""
        return _sum([rubric.failed(error) for rubric in self.rubrics])


def _doubled(names: Sequence[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _sum(scores: Sequence[Score]) -> Score:
    return Score(
        sum(score.reward for score in scores),
        {name: value for score in scores for name, value in score.breakdown.items()},
        is_scored=all(score.is_scored for score in scores),
        error=next((score.error for score in scores if score.error), ""),
    )


async def scores_of(rubric: Rubric, rollouts: Sequence[RewardInput], *, parent: str = "") -> list[Score]:
    """Score finished rollouts, in order: as one group if the rubric scores groups, else each in a tracing span."""
    if rubric.is_group_scored:
        return await rubric.score_group(rollouts)
    return list(await asyncio.gather(*(_score_in_span(rubric, rollout, parent) for rollout in rollouts)))


async def _score_in_span(rubric: Rubric, rollout: RewardInput, parent: str) -> Score:
    with span("reward", parent=parent) as current:
        score = await rubric.score(rollout)
        if current is not None:
            for name, value in score.breakdown.items():
                event: dict[str, str | float] = {"gen_ai.evaluation.name": name, "gen_ai.evaluation.score.value": value}
                current.add_event("gen_ai.evaluation.result", event)
            if score.error:
                current.set_attribute("error.type", score.error.partition(":")[0])
    return score
