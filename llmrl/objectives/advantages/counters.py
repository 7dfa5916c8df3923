"""What became of groups on their way into training, counted, perhaps by several processes that write to one buffer."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Hashable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Self

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from llmrl.objectives.advantages.group_queue import GroupQueue, PickledRows


class GroupCounters(Transform):
    """A transform that waits for groups, counts what becomes of them, and can share both with other processes."""

    requires_shared_write_state = True
    """A replay buffer that is shared calls `share_memory_`."""
    completed_trajectories: int
    """Rollouts that came so far; this and the others are reset by `reset_stats`."""
    completed_decisions: int
    """Rows, or turns, that came."""
    trajectory_return_sum: float
    trajectory_return_max: float
    """Of the returns of scored rollouts."""
    successful_trajectories: int
    """Rollouts with a return above 0."""
    unscored_trajectories: int
    completed_groups: int
    """Groups decided on: `written_groups` and `dropped_groups`."""
    written_groups: int
    dropped_groups: int
    constant_groups: int
    """Groups without signal, dropped or not."""
    rescued_groups: int
    """Number of groups with their first `grpo_size` rollouts out of bounds, but those chosen within."""
    selected_trajectories: int
    unselected_trajectories: int
    """Candidates that were chosen, and were not."""

    def __init__(self, queue: GroupQueue | None) -> None:
        super().__init__()
        self.queue = queue
        """The incomplete groups held back, where groups have a size."""
        self._stats: MutableMapping[str, float] = {}
        self._lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._manager: object = None
        self.reset_stats()

    def __getattr__(self, name: str) -> Any:
        stats = self.__dict__.get("_stats", ())
        return stats[name] if name in stats else super().__getattr__(name)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_manager": None}

    def reset_stats(self) -> None:
        """Count from zero."""
        names = [name for name in GroupCounters.__annotations__ if not name.startswith(("trajectory", "queue"))]
        with self._lock:
            self._stats.update(dict.fromkeys(names, 0))
            self._stats.update(trajectory_return_sum=0.0, trajectory_return_max=float("-inf"))

    def get_stats(self) -> dict[str, float]:
        """Return all counters, and how much is waited for."""
        waiting = ("queued_groups", "queued_trajectories", "max_queued_trajectories_per_group")
        with self._lock:
            return {**self._stats, **{name: getattr(self, name) for name in waiting}}

    def _count(self, **added: float) -> None:
        for name, value in added.items():
            self._stats[name] += value

    @property
    def queues(self) -> Mapping[Hashable, list[TensorDictBase]]:
        """The rollouts that have come of each incomplete group, to read; `clear_queues` forgets them."""
        return MappingProxyType({} if self.queue is None else self.queue.rollouts())

    @property
    def queued_groups(self) -> int:
        """Groups that are incomplete so far."""
        return 0 if self.queue is None else len(self.queue.waiting)

    @property
    def queued_trajectories(self) -> int:
        """Rollouts of incomplete groups."""
        return sum(map(len, self.queues.values()))

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """The most rollouts that have come of a group that is incomplete."""
        return max(map(len, self.queues.values()), default=0)

    def clear_queues(self) -> None:
        """Forget incomplete groups."""
        with self._lock:
            if self.queue is not None:
                self.queue.waiting.clear()

    @property
    def is_shared(self) -> bool:
        """Whether other processes see the same counters and incomplete groups."""
        return self.queue is not None and isinstance(self.queue.waiting, PickledRows)

    def share_memory_(self) -> Self:
        """Keep counters and incomplete groups where all processes that write to a buffer see them."""
        if not self.is_shared:
            manager = multiprocessing.Manager()
            self._manager = manager
            self._lock = manager.RLock()
            self._stats = manager.dict(self._stats)
            if self.queue is not None:
                waiting = self.queue.waiting
                self.queue.waiting = PickledRows(manager.dict())
                self.queue.waiting.update(waiting)
        return self
