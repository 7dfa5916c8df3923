"""Groups of rollouts without an environment and text, for simulations with the real scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmrl.collectors.scheduler import RolloutTask
from llmrl.data import Rollout, RolloutStatus


@dataclass(slots=True, kw_only=True)
class SimulatedSource:
    """Source of an endless sequence of groups; a simulation defines in `play` what a rollout does."""

    engine: Any
    group_size: int
    num_opened: int = 0
    """Number of groups opened so far."""

    @property
    def policy_version(self) -> int:
        """Version of the engine's weights."""
        return int(self.engine.policy_version)

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Open the next groups."""
        groups = range(self.num_opened, self.num_opened + num_groups)
        self.num_opened += num_groups
        return [[self._task(str(group), index) for index in range(self.group_size)] for group in groups]

    def _task(self, group_id: str, index: int) -> RolloutTask:
        record = Rollout(
            rollout_id=f"{group_id}/{index}", group_id=group_id, sample_index=index, group_size=self.group_size
        )
        return RolloutTask(records=[record])

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Do nothing, because each rollout is scored when it ends."""


def completed(rollout: Rollout, num_turns: int) -> list[Rollout]:
    """Mark a rollout as completed after all its turns, and return the result of its task."""
    rollout.num_turns, rollout.status, rollout.is_scored = num_turns, RolloutStatus.COMPLETED, True
    return [rollout]
