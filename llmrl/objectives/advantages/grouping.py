"""Grouping of rows by group and rollout."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl.data.keys import GROUP_ID_KEY
from llmrl.data.ragged import check_entry, check_text, flat_batch, has_entry, write_column
from llmrl.data.tensordicts import non_tensor, plain

# Entries written into turns, which have no rollout id: name of the trajectory, and group of its first turn.
_TRAJECTORY: NestedKey = ("rollout", "trajectory")
_TRAJECTORY_GROUP: NestedKey = ("rollout", "trajectory_group")
_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"sum": torch.sum, "max": torch.max, "mean": torch.mean}
TrajectoryReturn = Literal["sum", "max", "mean"]


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """Entries of a row that identify its group and rollout."""

    group: NestedKey | None = None
    """By default `("rollout", "group_id")`, otherwise the prompt, `"query"` or `("text", "prompt")`."""
    rollout: NestedKey = ("rollout", "rollout_id")
    is_scored: NestedKey = ("rollout", "is_scored")
    rewards: NestedKey = ("next", "reward")
    done: NestedKey = ("next", "done")
    num_in_group: NestedKey = ("rollout", "num_in_group")
    by: NestedKey | None = None
    """Entry that divides a group into parts that are compared separately; None compares the whole group."""

    @property
    def read(self) -> list[NestedKey]:
        """Required entries of rows: group (or else the rollout id) and reward."""
        return [self.group or self.rollout, self.rewards]

    def rows(self, tensordict: TensorDictBase) -> list[TensorDictBase]:
        """Return a batch's rows, with turns assigned to trajectories; the batch's last dimension is time.

        Raises RuntimeError if the last trajectory along that dimension does not end.
        """
        if not tensordict.batch_size.numel():
            return []
        rows = list(flat_batch(tensordict).unbind(0))
        if not has_entry(tensordict, _TRAJECTORY):
            # In a batch [num_envs, time], one environment's turns do not continue the trajectory of the one before.
            num_steps = tensordict.batch_size[-1] if tensordict.ndim else 1
            for start in range(0, len(rows), num_steps):
                self._name_trajectories(rows[start : start + num_steps])
        return rows

    def _name_trajectories(self, steps: list[TensorDictBase]) -> None:
        """Write the trajectory and its group into the turns among consecutive rows."""
        turns = [row for row in steps if not has_entry(row, self.rollout) and has_entry(row, self.done)]
        if turns and not bool(turns[-1].get(self.done).any()):
            raise RuntimeError(
                f"the last turn is not done ({self.done!r}), but groups consist of whole trajectories: collect with "
                "yield_completed_trajectories=True."
            )
        name = ""
        group = None
        for row in turns:
            if not name:
                name = uuid.uuid4().hex
                group = self.group_id(row)
            row.set(_TRAJECTORY, non_tensor(name))
            row.set(_TRAJECTORY_GROUP, non_tensor(group))
            if bool(row.get(self.done).any()):
                name = ""

    def are_turns(self, rows: list[TensorDictBase]) -> bool:
        """Return whether these are turns with their own rewards, not rows with their rollout's reward."""
        return has_entry(rows[0], _TRAJECTORY)

    def scored(self, row: TensorDictBase) -> bool:
        """Return whether the row's rollout was scored (assumed if the entry is missing) with a finite reward."""
        is_scored = not has_entry(row, self.is_scored) or bool(row.get(self.is_scored))
        return is_scored and (not has_entry(row, self.rewards) or bool(row.get(self.rewards).isfinite().all()))

    def rollout_id(self, row: TensorDictBase) -> Hashable:
        """Return the id of the row's rollout."""
        return _identifier(row, _TRAJECTORY if has_entry(row, _TRAJECTORY) else self.rollout)

    def group_id(self, row: TensorDictBase) -> Hashable:
        """Return the id of the row's group."""
        if has_entry(row, _TRAJECTORY_GROUP):
            return _identifier(row, _TRAJECTORY_GROUP)
        if self.group is not None:
            return _identifier(row, self.group)
        keys: tuple[NestedKey, ...] = (GROUP_ID_KEY, "query", ("text", "prompt"))
        return _identifier(row, next((key for key in keys if has_entry(row, key)), "query"))

    def compared_id(self, row: TensorDictBase) -> Hashable:
        """Return the id of the group, or part of it, with which the row's rollout is compared."""
        return self.group_id(row) if self.by is None else (self.group_id(row), _identifier(row, self.by))

    def size(self, row: TensorDictBase, default: int) -> int:
        """Return the number of rollouts in the row's group, as counted by its collector, or the default."""
        return int(row.get(self.num_in_group)) if has_entry(row, self.num_in_group) else default

    def rollout_values(
        self, rows: list[TensorDictBase], key: NestedKey, turns: TrajectoryReturn = "sum"
    ) -> dict[Hashable, float]:
        """Return the number under `key`, summed over its entries, for each rollout of one group's rows.

        `turns` reduces the numbers of a trajectory's turns. Raises KeyError if a row has no such
        entry, and ValueError if a value is not finite or rows of one rollout disagree.
        """
        values: dict[Hashable, float] = {}
        numbers: dict[Hashable, list[torch.Tensor]] = {}
        for row in rows:
            check_entry(row, key, owner="A row")
            rollout_id = self.rollout_id(row)
            value = float(row.get(key).sum())
            if not math.isfinite(value):
                raise ValueError(f"rollout {rollout_id!r} has {value} under {key!r}, which is not a finite number.")
            if self.are_turns([row]):
                numbers.setdefault(rollout_id, []).append(row.get(key).flatten())
            elif values.setdefault(rollout_id, value) != value:
                raise ValueError(
                    f"Rows of rollout {rollout_id!r} have different values, {values[rollout_id]} and {value}, under "
                    f"{key!r}; every row must carry the whole reward of its rollout."
                )
        return values | {name: float(_REDUCED[turns](torch.cat(found))) for name, found in numbers.items()}


def _identifier(row: TensorDictBase, key: NestedKey) -> Hashable:
    check_entry(row, key, owner="A row")
    value = plain(row.get(key))
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    check_text(value, key)
    return value if isinstance(value, Hashable) else str(value)


def grouped(
    rows: Iterable[TensorDictBase], identify: Callable[[TensorDictBase], Hashable]
) -> dict[Hashable, list[TensorDictBase]]:
    """Return the rows with the same id by this id, in order of their first row."""
    found: dict[Hashable, list[TensorDictBase]] = {}
    for row in rows:
        found.setdefault(identify(row), []).append(row)
    return found


def split_by_group(rows: list[TensorDictBase], keys: GroupKeys) -> list[list[TensorDictBase]]:
    """Return the rows of each group, or compared part of a group, in order of their first row."""
    return list(grouped(rows, keys.compared_id).values())


def by_rollout(rows: Sequence[TensorDictBase], keys: GroupKeys) -> list[TensorDictBase]:
    """Return a batch of rows for each rollout."""
    return [lazy_stack(found, 0) for found in grouped(rows, keys.rollout_id).values()]


def add_to_rewards(tensordict: TensorDictBase, additions: Sequence[float], key: NestedKey) -> None:
    """Add a number to each row's reward in place; a dense reward is changed at its last token.

    Example:
        >>> batch = lazy_stack([TensorDict(reward=torch.ones(1, 1)), TensorDict(reward=torch.zeros(3, 1))])
        >>> add_to_rewards(batch, [0.5, -1.0], "reward")
        >>> [row["reward"].flatten().tolist() for row in batch.unbind(0)]
        [[1.5], [0.0, 0.0, -1.0]]
    """
    rewards = [row.get(key).clone() for row in flat_batch(tensordict).unbind(0)]
    for reward, addition in zip(rewards, additions, strict=True):
        reward.view(-1)[-1] += addition
    write_column(tensordict, key, rewards)


def stack_rows(rows: list[TensorDictBase]) -> TensorDictBase:
    """Return a ragged batch of the rows; an empty batch without rows."""
    return lazy_stack(rows, 0) if rows else TensorDict({}, batch_size=[0])
