"""Queue of the rows of incomplete groups."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Hashable, Iterator, MutableMapping

from tensordict import TensorDictBase

from llmrl.objectives.advantages.grouping import GroupKeys, by_rollout, grouped


class PickledRows(MutableMapping[Hashable, list[TensorDictBase]]):
    """Rows by group, pickled into a dictionary such as `multiprocessing.Manager().dict()`.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = PickledRows({})
        >>> rows["g"] = [TensorDict(a=[1.0, 2.0])]
        >>> len(rows), rows["g"][0]["a"].shape
        (1, torch.Size([2]))
    """

    def __init__(self, pickled: MutableMapping[Hashable, bytes]) -> None:
        self._pickled = pickled

    def __getitem__(self, group: Hashable) -> list[TensorDictBase]:
        rows: list[TensorDictBase] = pickle.loads(self._pickled[group])
        return rows

    def __setitem__(self, group: Hashable, rows: list[TensorDictBase]) -> None:
        self._pickled[group] = pickle.dumps(rows)

    def __delitem__(self, group: Hashable) -> None:
        del self._pickled[group]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._pickled.keys()))

    def __len__(self) -> int:
        return len(self._pickled)


class GroupQueue:
    """Holds rows back until all rollouts of their group have arrived.

    Args:
        keys: entries that identify groups and rollouts.
        num_rollouts: number of rollouts per group, scored or not, if the rows do not contain it.
        max_num_waiting: maximum number of incomplete groups; beyond it, the oldest group is dropped with a warning.

    Example:
        >>> from tensordict import TensorDict
        >>> rows = [TensorDict(rollout=TensorDict(group_id="g", rollout_id=name)) for name in "ab"]
        >>> queue = GroupQueue(GroupKeys(), 2)
        >>> len(queue.push(rows[:1])), len(queue.push(rows[1:]))
        (0, 2)
    """

    def __init__(self, keys: GroupKeys, num_rollouts: int, max_num_waiting: int = 1024) -> None:
        self.keys = keys
        self.num_rollouts = num_rollouts
        self.max_num_waiting = max_num_waiting
        self.num_abandoned = 0
        """Number of groups dropped because they stayed incomplete."""
        self.waiting: MutableMapping[Hashable, list[TensorDictBase]] = {}
        """Rows of each incomplete group, the oldest group first."""

    def rollouts(self) -> dict[Hashable, list[TensorDictBase]]:
        """Return the rollouts of each incomplete group, each as a batch of rows."""
        return {group: by_rollout(rows, self.keys) for group, rows in self.waiting.items()}

    def push(self, rows: list[TensorDictBase]) -> list[TensorDictBase]:
        """Add rows and return all rows of groups that are now complete."""
        ready: list[TensorDictBase] = []
        # Groups are checked only after all rows are added, so that the rows of a rollout stay together.
        for group, new in grouped(rows, self.keys.group_id).items():
            known = [*self.waiting.get(group, ()), *new]
            if len(set(map(self.keys.rollout_id, known))) < self.keys.size(new[-1], self.num_rollouts):
                self.waiting[group] = known
            else:
                ready += known
                self.waiting.pop(group, None)
        self._drop_oldest()
        return ready

    def put_back(self, rows: list[TensorDictBase]) -> None:
        """Queue a group again until more of its rollouts arrive."""
        self.waiting[self.keys.group_id(rows[0])] = rows
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self.waiting) > self.max_num_waiting:
            oldest = next(iter(self.waiting))
            rows = self.waiting.pop(oldest)
            size = self.keys.size(rows[-1], self.num_rollouts)
            self.num_abandoned += 1
            warnings.warn(
                f"Group {oldest!r} was dropped: it stayed incomplete with {len(rows)} rows while "
                f"{self.max_num_waiting} later groups arrived (it has {size} rollouts).",
                stacklevel=5,
            )
