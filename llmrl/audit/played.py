"""`Played`: the results of one answer to every problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from llmrl.audit.answers import Kind
from llmrl.data import Rollout, StopReason


@dataclass(frozen=True, slots=True)
class Played:
    """The rollouts of one answer to every problem for which it exists."""

    name: str
    kind: Kind
    rollouts: Sequence[Rollout]
    seconds: float = 0.0

    @property
    def rewards(self) -> list[float]:
        """Rewards of the scored rollouts."""
        return [rollout.reward for rollout in self.rollouts if rollout.is_scored]

    @property
    def mean(self) -> float | None:
        """Mean reward; None if no rollout is scored."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def errors(self) -> list[Rollout]:
        """Rollouts in which the environment or a reward function raised."""
        return [rollout for rollout in self.rollouts if rollout.error]

    @property
    def late(self) -> list[Rollout]:
        """Rollouts that exceeded the time limit."""
        return [rollout for rollout in self.rollouts if rollout.reason == StopReason.TIMEOUT]

    @property
    def unscored(self) -> list[Rollout]:
        """Rollouts without a reward and without an error."""
        return [rollout for rollout in self.rollouts if not rollout.is_scored and not rollout.error]

    @property
    def num_pairs(self) -> int:
        """Number of problems with at least two scored rollouts."""
        return len(self._groups())

    @property
    def num_unequal(self) -> int:
        """Number of problems with different rewards for equal answers."""
        return sum(len(set(rewards)) > 1 for rewards in self._groups())

    def _groups(self) -> list[list[float]]:
        groups: dict[str, list[float]] = defaultdict(list)
        for rollout in self.rollouts:
            if rollout.is_scored:
                groups[rollout.group_id].append(rollout.reward)
        return [rewards for rewards in groups.values() if len(rewards) > 1]
