"""`Rubric`: reward functions, weighed into one reward with its breakdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmrl.data import RolloutStatus
from llmrl.rewards.reward import RewardFn, ScoredRollout, UnknownRewardInput


@dataclass(frozen=True, slots=True)
class Score:
    """A rollout's reward."""

    reward: float
    """The weighted mean; 0 when the rollout was not scored."""
    breakdown: dict[str, float] = field(default_factory=dict)
    """Raw value of each reward function."""
    is_scored: bool = True
    """False: the rollout takes no part in batch and baseline."""
    error: str = ""
    """Why scoring failed, if it did."""


class Rubric:
    """Scores rollouts with named, weighted reward functions.

    The reward is `sum(weight * raw) / sum(weight)`. Raw values are kept as the breakdown. To score the rollouts of a
    group together (pairwise, or by a judge that sees all), override `score_group`.

    Args:
        reward_fns: `RewardFn`s, or plain functions (weight 1).
        truncation_reward: reward of truncated rollouts; None scores what there is.
        error_reward: reward of rollouts that failed; None leaves them unscored.
        timeout_seconds: limit of one rollout's scoring; a judge that takes longer has failed.

    Raises:
        ValueError: without reward functions, with two of one name, or when the weights sum to nothing.

    Example:
        >>> from llmrl.data import run_sync
        >>> rubric = Rubric(RewardFn(lambda completion: 1.0, name="right", weight=3),
        ...                 RewardFn(lambda completion: 0.0, name="short"))
        >>> run_sync(rubric.score(ScoredRollout(({"role": "assistant", "content": "15"},))))
        Score(reward=0.75, breakdown={'right': 1.0, 'short': 0.0}, is_scored=True, error='')
    """

    def __init__(
        self,
        *reward_fns: RewardFn | Callable[..., Any],
        truncation_reward: float | None = None,
        error_reward: float | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self.reward_fns = [fn if isinstance(fn, RewardFn) else RewardFn(fn) for fn in reward_fns]
        if not self.reward_fns:
            raise ValueError("reward_fns is empty; a rubric needs at least one reward function.")
        names = [fn.name for fn in self.reward_fns]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"reward_fns must have unique names, got {doubled} more than once; pass name=.")
        self._total_weight = sum(fn.weight for fn in self.reward_fns)
        if not self._total_weight > 0:
            raise ValueError(f"the weights of {names} must have a positive sum, got {self._total_weight}.")
        self.truncation_reward, self.error_reward = truncation_reward, error_reward
        self.timeout_seconds = timeout_seconds

    @property
    def names(self) -> list[str]:
        """Names of the reward functions, in order."""
        return [fn.name for fn in self.reward_fns]

    @property
    def is_async(self) -> bool:
        """Whether scoring may take long: a reward function awaits something, a judge say."""
        return any(fn.is_async for fn in self.reward_fns)

    @property
    def is_group_scored(self) -> bool:
        """Whether the rollouts of a group are scored together, once all have settled."""
        return type(self).score_group is not Rubric.score_group

    async def score(self, rollout: ScoredRollout) -> Score:
        """Score one settled rollout. A failing reward function never ends it: it is scored as an error."""
        if rollout.status is RolloutStatus.TRUNCATED and self.truncation_reward is not None:
            return Score(self.truncation_reward)
        if rollout.status in (RolloutStatus.ERROR, RolloutStatus.ABORTED):
            return self.failed(rollout.reason)
        try:
            gathered = asyncio.gather(*(fn.score(rollout) for fn in self.reward_fns))
            raw = await asyncio.wait_for(gathered, self.timeout_seconds)
        except UnknownRewardInput:
            raise
        except Exception as error:
            return self.failed(f"{type(error).__name__}: {error}")
        reward = sum(fn.weight * value for fn, value in zip(self.reward_fns, raw, strict=True)) / self._total_weight
        return Score(reward, dict(zip(self.names, raw, strict=True)))

    async def score_group(self, rollouts: Sequence[ScoredRollout]) -> list[Score]:
        """Score the rollouts of one group, in order. Override to compare them with each other."""
        return list(await asyncio.gather(*(self.score(rollout) for rollout in rollouts)))

    def failed(self, error: str) -> Score:
        """The score of a rollout that failed or could not be scored."""
        if self.error_reward is None:
            return Score(0.0, is_scored=False, error=error)
        return Score(self.error_reward, error=error)
