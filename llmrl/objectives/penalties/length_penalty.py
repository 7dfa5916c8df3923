"""Rewards for length, relative to a budget or to the other answers of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NoReturn

import torch
from tensordict import TensorDictBase
from torchrl.envs.transforms import Transform

from llmrl.data.keys import LOSS_MASK_KEY
from llmrl.data.ragged import flat_batch, has_entry, ragged_column, write_column
from llmrl.objectives.advantages.grouping import GroupKeys, add_to_rewards, split_by_group

_WRITTEN = "length_penalty"
LengthReward = Callable[[Sequence[int], Sequence[float]], Sequence[float]]
"""Function of a group's lengths, in sampled tokens, and rewards; returns an unweighted addition to each reward."""


def soft_overlong(
    lengths: Sequence[int], rewards: Sequence[float] = (), *, max_length: int, cache_length: int
) -> list[float]:
    """Return DAPO's soft overlong punishment of each answer (arXiv:2503.14476, equation 13).

    It is 0 up to `max_length - cache_length` sampled tokens, falls to -1 at `max_length` and stays
    there. `rewards` is ignored. Raises ValueError unless `0 < cache_length <= max_length`.

    Example:
        >>> soft_overlong([10, 15, 30], max_length=20, cache_length=10)
        [0.0, -0.5, -1.0]
    """
    if not 0 < cache_length <= max_length:
        raise ValueError(f"cache_length must be from 1 to max_length={max_length}, got {cache_length}.")
    return [0.0 - min(1.0, max(0.0, (length - (max_length - cache_length)) / cache_length)) for length in lengths]


def group_relative_length(lengths: Sequence[int], rewards: Sequence[float], *, right_from: float = 1.0) -> list[float]:
    """Return Kimi k1.5's length reward of each answer of a group (arXiv:2501.12599, section 2.3.3).

    It falls from 0.5 for the shortest answer to -0.5 for the longest, and is 0 if all lengths are
    equal. Wrong answers, with a reward below `right_from`, get at most 0.

    Example:
        >>> group_relative_length([10, 20, 30, 10], [1.0, 1.0, 1.0, 0.0])
        [0.5, 0.0, -0.5, 0.0]
    """
    shortest = min(lengths, default=0)
    longest = max(lengths, default=0)
    if shortest == longest:
        return [0.0] * len(lengths)
    values = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [value if reward >= right_from else min(0.0, value) for value, reward in zip(values, rewards, strict=True)]


class LengthPenalty(Transform):
    """Adds `coeff` times a function of lengths to the rewards of rollouts, before `MCAdvantage`.

    The length of a rollout is its number of sampled tokens over all turns and rows. `length_reward` is
    `partial(soft_overlong, max_length=..., cache_length=...)`, `group_relative_length`, or any function of a group's
    lengths and rewards. The addition is written as `"length_penalty"`, `[1, 1]` per row; a batch that has it is
    returned as is. Pass it to the collector (`postproc`); a replay buffer, where groups arrive in parts, raises
    ValueError. `GroupRules` filters by rewards before the addition, `MCAdvantage` by those after it.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> rows = [TensorDict({"next": {"reward": torch.ones(1, 1)}, "rollout": {"rollout_id": n, "group_id": 0},
        ...     "masks": {"all_assistant_mask": torch.ones(n, dtype=torch.bool)}}) for n in (1, 3)]
        >>> batch = LengthPenalty(group_relative_length, 0.2)(lazy_stack(rows))
        >>> [round(float(row["next", "reward"]), 2) for row in batch.unbind(0)]
        [1.1, 0.9]
    """

    def __init__(self, length_reward: LengthReward | partial[list[float]], coeff: float = 1.0) -> None:
        super().__init__()
        self.length_reward = length_reward
        self.coeff = coeff
        self.keys = GroupKeys()
        self.in_keys = [LOSS_MASK_KEY, self.keys.rewards]
        self.out_keys = [self.keys.rewards, _WRITTEN]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Change the rewards of a batch of complete groups in place; raise ValueError for turns."""
        batch = flat_batch(tensordict)
        if not batch.batch_size.numel() or has_entry(batch, _WRITTEN):
            return tensordict
        rows = self.keys.rows(batch)
        if self.keys.are_turns(rows):
            raise ValueError("LengthPenalty changes rewards of rollouts, but these rows are turns: pass training rows.")
        lengths: Counter[Hashable] = Counter()
        for row, mask in zip(rows, ragged_column(batch, LOSS_MASK_KEY), strict=True):
            lengths[self.keys.rollout_id(row)] += int(mask.sum())
        added: dict[Hashable, float] = {}
        for group in split_by_group(rows, self.keys):
            rewards = self.keys.rollout_values([row for row in group if self.keys.scored(row)], self.keys.rewards)
            given = list(self.length_reward([lengths[name] for name in rewards], list(rewards.values())))
            if len(given) != len(rewards):
                raise ValueError(f"length_reward must return {len(rewards)} numbers, one per rollout, got {given}.")
            added |= {name: self.coeff * value for name, value in zip(rewards, given, strict=True)}
        changes = [added.get(self.keys.rollout_id(row), 0.0) for row in rows]
        add_to_rewards(tensordict, changes, self.keys.rewards)
        write_column(tensordict, _WRITTEN, [torch.full((1, 1), change) for change in changes])
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> NoReturn:
        """Raise ValueError, as rows reach a replay buffer before their group is complete."""
        raise ValueError(
            "LengthPenalty needs complete groups, but a replay buffer is written as rows arrive: pass it to the "
            "collector (postproc), before MCAdvantage, instead of appending it to the buffer."
        )
