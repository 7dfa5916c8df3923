"""Rows by group and rollout: who belongs to whom, and who is still waited for."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl.data.ragged import flat_batch, has_entry, value_column


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Where rows say what they belong to."""

    group: NestedKey = ("rollout", "group_id")
    rollout: NestedKey = ("rollout", "rollout_id")
    is_scored: NestedKey = ("rollout", "is_scored")
    rewards: NestedKey = ("next", "reward")
    num_in_group: NestedKey = ("rollout", "num_in_group")

    def scored(self, row: TensorDictBase) -> bool:
        """Return whether the row's rollout was scored, with a finite reward; rows that do not say were."""
        is_scored = not has_entry(row, self.is_scored) or bool(row.get(self.is_scored))
        return is_scored and (not has_entry(row, self.rewards) or bool(row.get(self.rewards).isfinite().all()))

    def rollout_id(self, row: TensorDictBase) -> Hashable:
        """Return the id of the row's rollout."""
        return value_column(row.unsqueeze(0), self.rollout)[0]

    def group_ids(self, batch: TensorDictBase) -> list[Hashable]:
        """Return the id of each row's group."""
        return value_column(batch, self.group)

    def sizes(self, batch: TensorDictBase, default: int) -> list[int]:
        """Rollouts that there will be of each row's group: as its collector counted them, or the default."""
        if not has_entry(batch, self.num_in_group):
            return [default] * batch.batch_size[0]
        return batch.get(self.num_in_group).tolist()

    def rollout_values(self, rows: list[TensorDictBase], key: NestedKey) -> dict[Hashable, float]:
        """Return the number under `key`, summed over its entries, of each rollout of `rows`.

        Raises:
            KeyError: when a row has no such entry.
            ValueError: for a value that is not finite, or when rows of one rollout disagree.
        """
        values: dict[Hashable, float] = {}
        for row in rows:
            if not has_entry(row, key):
                raise KeyError(f"A row has no {key!r}; it has {sorted(map(str, row.keys(True, True)))}.")
            rollout_id, value = self.rollout_id(row), float(row.get(key).sum())
            if not math.isfinite(value):
                raise ValueError(f"rollout {rollout_id!r} has {value} under {key!r}, which is no finite number.")
            if values.setdefault(rollout_id, value) != value:
                raise ValueError(
                    f"Rows of rollout {rollout_id!r} have different values, {values[rollout_id]} and {value}, under "
                    f"{key!r}; every row must carry the whole reward of its rollout."
                )
        return values


def split_by_group(batch: TensorDictBase, keys: GroupKeys) -> list[list[TensorDictBase]]:
    """Return the rows of each group, groups in the order of their first row."""
    groups: dict[Hashable, list[TensorDictBase]] = {}
    for row, group in zip(batch.unbind(0), keys.group_ids(batch), strict=True):
        groups.setdefault(group, []).append(row)
    return list(groups.values())


def stack_rows(rows: list[TensorDictBase]) -> TensorDictBase:
    """Return a ragged batch; of no row, an empty one."""
    return lazy_stack(rows, 0) if rows else TensorDict({}, batch_size=[0])


class GroupQueue:
    """Holds rows back until all rollouts of their group have come.

    Of a collector's groups those that failed, were late or were filtered never come; its rows say how many do.

    Args:
        keys: where rows say what they belong to.
        num_rollouts: rollouts in a group, scored or not, where its rows do not say.
        max_num_waiting: beyond it the oldest incomplete group is dropped, with a warning.
    """

    def __init__(self, keys: GroupKeys, num_rollouts: int, max_num_waiting: int) -> None:
        self.keys, self.num_rollouts, self.max_num_waiting = keys, num_rollouts, max_num_waiting
        self.num_abandoned = 0
        """Groups dropped because they stayed incomplete."""
        self._waiting: OrderedDict[Hashable, list[TensorDictBase]] = OrderedDict()

    def push(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Take rows in; returns those of the groups that are complete now."""
        batch = flat_batch(tensordict)
        touched: dict[Hashable, int] = {}  # rollouts to wait for
        sizes = self.keys.sizes(batch, self.num_rollouts)
        for row, group, size in zip(batch.unbind(0), self.keys.group_ids(batch), sizes, strict=True):
            self._waiting.setdefault(group, []).append(row)
            touched[group] = size
        ready: list[TensorDictBase] = []
        # Only after the whole call, so that all rows of a rollout that came together stay together.
        for group, size in touched.items():
            if len({self.keys.rollout_id(row) for row in self._waiting[group]}) >= size:
                ready += self._waiting.pop(group)
        while len(self._waiting) > self.max_num_waiting:
            oldest, rows = self._waiting.popitem(last=False)
            self.num_abandoned += 1
            warnings.warn(
                f"Group {oldest!r} was dropped: it stayed incomplete with {len(rows)} rows while "
                f"{self.max_num_waiting} later groups came (groups of {self.num_rollouts} rollouts).",
                stacklevel=4,
            )
        return stack_rows(ready)
