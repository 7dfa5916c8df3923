"""Group-relative Monte-Carlo advantages."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl.data.ragged import flat_batch, has_entry, value_column

Normalization = Literal["std", "mean", "leave_one_out"]


def group_advantages(rewards: Sequence[float], normalization: Normalization = "std") -> list[float]:
    """Advantage of each rollout of one group, from the rewards of its scored rollouts.

    - `std`: `(r - mean) / std` (GRPO, arXiv:2402.03300, section 4.1.2), the unbiased standard deviation;
    - `mean`: `r - mean` (Dr. GRPO, arXiv:2503.20783, section 3.2);
    - `leave_one_out`: `r` minus the mean of the others (RLOO, arXiv:2402.14740, section 3.3).

    A group whose rewards are all equal, or of one rollout, has no signal: zeros.

    Raises:
        ValueError: for an unknown normalization.

    Example:
        >>> group_advantages([0.0, 1.0], "mean"), group_advantages([0.0, 0.0, 1.0], "leave_one_out")
        ([-0.5, 0.5], [-0.5, -0.5, 1.0])
    """
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization must be one of {list(get_args(Normalization))}, got {normalization!r}.")
    num_rollouts = len(rewards)
    if num_rollouts < 2 or max(rewards) == min(rewards):
        return [0.0] * num_rollouts
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if normalization == "std":
        centred = centred / values.std().clamp(min=1e-6)
    elif normalization == "leave_one_out":
        centred = centred * num_rollouts / (num_rollouts - 1)
    return centred.tolist()


class MCAdvantage(Transform):
    """Writes `"advantage"`, `[1, 1]` a row: the rollout's reward relative to its group.

    A group is what shares `("rollout", "group_id")`, never a prompt's text, which would mix epochs and versions. The
    rows of one rollout count once in the baseline and share its advantage, undivided. Unscored rollouts leave the
    baseline and the batch, and so, unless told otherwise, do groups without signal.

    As a transform of a collector (`forward`) the groups are complete in the batch; a batch that has advantages, such
    as one sampled from a replay buffer, is left alone. Appended to a replay buffer (`inv`, on `extend`) it holds rows
    back until `grpo_size` rollouts of their group have come; without `grpo_size` every group is taken as complete.

    Args:
        grpo_size: rollouts in a group, scored or not.
        normalization: see `group_advantages`.
        is_constant_group_dropped: leave out groups whose rewards are all equal (DAPO, arXiv:2503.14476, equation 11).
        max_num_waiting_groups: beyond it the oldest incomplete group is dropped, with a warning.
        group_key, rollout_key, is_scored_key, rewards_key, advantage_key: entries read and written.

    Raises:
        ValueError: for an unknown normalization, or sizes below one.

    Example:
        >>> rows = [TensorDict({"rollout": {"group_id": "g", "rollout_id": str(i)}, "next": {"reward": [[float(i)]]}})
        ...         for i in range(2)]
        >>> MCAdvantage(normalization="mean")(lazy_stack(rows))["advantage"].flatten().tolist()
        [-0.5, 0.5]
    """

    def __init__(
        self,
        grpo_size: int | None = None,
        *,
        normalization: Normalization = "std",
        is_constant_group_dropped: bool = True,
        max_num_waiting_groups: int = 1024,
        group_key: NestedKey = ("rollout", "group_id"),
        rollout_key: NestedKey = ("rollout", "rollout_id"),
        is_scored_key: NestedKey = ("rollout", "is_scored"),
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
    ) -> None:
        super().__init__()
        group_advantages([], normalization)
        for name, value in (("grpo_size", grpo_size), ("max_num_waiting_groups", max_num_waiting_groups)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.grpo_size = grpo_size
        self.normalization: Normalization = normalization
        self.is_constant_group_dropped = is_constant_group_dropped
        self.max_num_waiting_groups = max_num_waiting_groups
        self.group_key, self.rollout_key, self.is_scored_key = group_key, rollout_key, is_scored_key
        self.rewards_key, self.advantage_key = rewards_key, advantage_key
        self.in_keys = [group_key, rollout_key, rewards_key]
        self.out_keys = [advantage_key]
        self.num_groups = 0
        """Groups given advantages so far."""
        self.num_constant_groups = 0
        """Groups without signal so far."""
        self.num_unscored_rollouts = 0
        self.num_abandoned_groups = 0
        """Groups dropped because they stayed incomplete."""
        self._waiting: OrderedDict[Hashable, list[TensorDictBase]] = OrderedDict()

    @property
    def num_waiting_groups(self) -> int:
        """Incomplete groups held back."""
        return len(self._waiting)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages into a batch of complete groups; returns the rows that stay, in their order."""
        if has_entry(tensordict, self.advantage_key):
            return tensordict
        return self._complete(tensordict)

    def _complete(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not tensordict.batch_size.numel():
            return tensordict
        rows = list(flat_batch(tensordict).unbind(0))
        groups: dict[Hashable, list[int]] = {}
        for place, group in enumerate(value_column(flat_batch(tensordict), self.group_key)):
            groups.setdefault(group, []).append(place)
        kept = [place for places in groups.values() for place in places if self._is_scored(rows[place])]
        for places in groups.values():
            for place in self._settle([rows[place] for place in places], places):
                kept.remove(place)
        return self._stack([rows[place] for place in sorted(kept)])

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold rows back until their group is complete; returns complete groups, or None."""
        if self.grpo_size is None:
            complete = self._complete(tensordict)
            return complete if complete.batch_size.numel() else None
        batch = flat_batch(tensordict)
        ready: list[TensorDictBase] = []
        touched: dict[Hashable, None] = {}
        for row, group in zip(batch.unbind(0), value_column(batch, self.group_key), strict=True):
            self._waiting.setdefault(group, []).append(row)
            touched[group] = None
        # Only after the whole call, so that all rows of a rollout that came together stay together.
        for group in touched:
            if len({self._rollout_id(row) for row in self._waiting[group]}) >= self.grpo_size:
                ready += self._waiting.pop(group)
        self._abandon_oldest()
        if not ready:
            return None
        complete = self._complete(lazy_stack(ready, 0))
        return complete if complete.batch_size.numel() else None

    def _abandon_oldest(self) -> None:
        while len(self._waiting) > self.max_num_waiting_groups:
            group, rows = self._waiting.popitem(last=False)
            self.num_abandoned_groups += 1
            warnings.warn(
                f"MCAdvantage dropped group {group!r}: it stayed incomplete with {len(rows)} rows while "
                f"{self.max_num_waiting_groups} later groups came (grpo_size={self.grpo_size}).",
                stacklevel=3,
            )

    def _settle(self, rows: list[TensorDictBase], places: list[int]) -> list[int]:
        """Write the advantages of one group; returns the places of scored rows that are to be dropped."""
        rewards: dict[Hashable, float] = {}
        scored: list[tuple[int, TensorDictBase, Hashable]] = []
        unscored: set[Hashable] = set()
        for place, row in zip(places, rows, strict=True):
            rollout_id = self._rollout_id(row)
            if not self._is_scored(row):
                unscored.add(rollout_id)
                continue
            reward = float(row.get(self.rewards_key).sum())
            if rewards.setdefault(rollout_id, reward) != reward:
                raise ValueError(
                    f"Rows of rollout {rollout_id!r} have different rewards, {rewards[rollout_id]} and {reward}; "
                    f"every row must carry the rollout's whole reward under {self.rewards_key!r}."
                )
            scored.append((place, row, rollout_id))
        self.num_unscored_rollouts += len(unscored)
        if not rewards:
            return []
        self.num_groups += 1
        is_constant = len(rewards) < 2 or len(set(rewards.values())) == 1
        self.num_constant_groups += is_constant
        if is_constant and self.is_constant_group_dropped:
            return [place for place, _, _ in scored]
        advantages = dict(zip(rewards, group_advantages(list(rewards.values()), self.normalization), strict=True))
        for _, row, rollout_id in scored:
            row.set(self.advantage_key, torch.full((*row.batch_size, 1, 1), advantages[rollout_id]))
        return []

    def _is_scored(self, row: TensorDictBase) -> bool:
        return not has_entry(row, self.is_scored_key) or bool(row.get(self.is_scored_key))

    def _rollout_id(self, row: TensorDictBase) -> Any:
        value = row.get(self.rollout_key)
        return getattr(value, "data", value) if not isinstance(value, torch.Tensor) else value.item()

    @staticmethod
    def _stack(rows: list[TensorDictBase]) -> TensorDictBase:
        return lazy_stack(rows, 0) if rows else TensorDict({}, batch_size=[0])
