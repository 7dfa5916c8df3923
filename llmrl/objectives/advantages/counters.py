"""Counters of groups, which can be shared by processes that write to the same buffer."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Hashable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Self

from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from llmrl._utils.types import StateDict
from llmrl.objectives.advantages.group_queue import GroupQueue, PickledRows


class GroupCounters(Transform):
    """Base class of transforms that queue incomplete groups and count completed ones."""

    requires_shared_write_state = True
    """Makes a shared replay buffer call `share_memory_`."""
    completed_trajectories: int
    """Number of rollouts received; `reset_stats` resets this and all other counters."""
    completed_decisions: int
    """Number of rows or turns received."""
    trajectory_return_sum: float
    trajectory_return_max: float
    """Maximum return of the scored rollouts."""
    successful_trajectories: int
    """Number of rollouts with a return above 0."""
    unscored_trajectories: int
    completed_groups: int
    """Number of processed groups: `written_groups` plus `dropped_groups`."""
    written_groups: int
    dropped_groups: int
    constant_groups: int
    """Number of groups without signal, dropped or not."""
    rescued_groups: int
    """Number of groups that are within bounds only because candidates were selected."""
    selected_trajectories: int
    unselected_trajectories: int
    """Number of candidates that were not selected."""

    def __init__(self, queue: GroupQueue | None) -> None:
        super().__init__()
        self.queue = queue
        """Queue of incomplete groups; None if groups have no fixed size."""
        self._stats: MutableMapping[str, float] = {}
        self._lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._manager: object = None
        self.reset_stats()

    def __getattr__(self, name: str) -> Any:
        stats = self.__dict__.get("_stats", ())
        return stats[name] if name in stats else super().__getattr__(name)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_manager": None}

    @property
    def _waiting(self) -> MutableMapping[Hashable, list[TensorDictBase]]:
        """Rows of each incomplete group."""
        return {} if self.queue is None else self.queue.waiting

    def get_extra_state(self) -> dict[str, object]:
        """Return the counters and the rows of incomplete groups, which a replay buffer saves with its own rows."""
        with self._lock:
            return {"counters": dict(self._stats), "waiting": list(self._waiting.values())}

    def set_extra_state(self, state: StateDict) -> None:
        """Restore the counters and the rows of incomplete groups."""
        with self._lock:
            self._stats.update(state["counters"])
            if self.queue is not None:
                self.queue.waiting.clear()
                self.queue.waiting.update({self.queue.keys.group_id(rows[0]): rows for rows in state["waiting"]})

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object) -> None:
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())  # absent from older states
        super()._load_from_state_dict(state_dict, prefix, *args)

    def reset_stats(self) -> None:
        """Reset all counters to zero."""
        names = [name for name in GroupCounters.__annotations__ if not name.startswith(("trajectory", "queue"))]
        with self._lock:
            self._stats.update(dict.fromkeys(names, 0))
            self._stats.update(trajectory_return_sum=0.0, trajectory_return_max=float("-inf"))

    def get_stats(self) -> dict[str, float]:
        """Return all counters and queue sizes by name."""
        waiting = ("queued_groups", "queued_trajectories", "max_queued_trajectories_per_group")
        with self._lock:
            return {**self._stats, **{name: getattr(self, name) for name in waiting}}

    def _count(self, **added: float) -> None:
        for name, value in added.items():
            self._stats[name] += value

    @property
    def queues(self) -> Mapping[Hashable, list[TensorDictBase]]:
        """Rollouts of each incomplete group, read-only."""
        return MappingProxyType({} if self.queue is None else self.queue.rollouts())

    @property
    def queued_groups(self) -> int:
        """Number of incomplete groups."""
        return len(self._waiting)

    @property
    def queued_trajectories(self) -> int:
        """Number of rollouts of incomplete groups."""
        return sum(map(len, self.queues.values()))

    @property
    def max_queued_trajectories_per_group(self) -> int:
        """Largest number of rollouts in an incomplete group."""
        return max(map(len, self.queues.values()), default=0)

    def clear_queues(self) -> None:
        """Remove all incomplete groups."""
        with self._lock:
            self._waiting.clear()

    @property
    def is_shared(self) -> bool:
        """Whether counters and incomplete groups are shared with other processes."""
        return not isinstance(self._stats, dict)

    def share_memory_(self) -> Self:
        """Move counters and incomplete groups to memory that all processes share."""
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
