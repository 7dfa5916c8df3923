"""Normalization of advantages within a group and over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from llmrl._utils.arguments import check_choice

Normalization = Literal["std", "mean", "leave_one_out", "relative", "none"]


def group_advantages(rewards: Sequence[float], normalization: Normalization = "std") -> list[float]:
    """Return the advantage of each scored rollout of one group.

    - `std`: `(r - mean) / std` with the unbiased standard deviation (GRPO, arXiv:2402.03300, section 4.1.2);
    - `mean`: `r - mean` (Dr. GRPO, arXiv:2503.20783, section 3.2);
    - `leave_one_out`: `r` minus the mean of the other rewards (RLOO, arXiv:2402.14740, section 3.3);
    - `relative`: `(r - mean) / mean` (MaxRL, arXiv:2602.02710); raises ValueError for negative rewards;
    - `none`: `r`, for a baseline over the whole batch (`batch_normalized`).

    Except with `none`, a group of one rollout or with equal rewards gets zeros.

    Example:
        >>> group_advantages([0.0, 1.0], "mean"), group_advantages([0.0, 0.0, 1.0], "leave_one_out")
        ([-0.5, 0.5], [-0.5, -0.5, 1.0])
    """
    check_choice(get_args(Normalization), normalization=normalization)
    if normalization == "none":
        return [float(reward) for reward in rewards]
    num_rollouts = len(rewards)
    if num_rollouts < 2 or max(rewards) == min(rewards):
        return [0.0] * num_rollouts
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if normalization == "std":
        centred = centred / values.std().clamp(min=1e-6)
    elif normalization == "relative":
        if min(rewards) < 0:
            raise ValueError(
                f"normalization='relative' needs rewards from 0 on, got {min(rewards)}; shift them, or use 'mean' or "
                "'std'."
            )
        centred = centred / values.mean()
    elif normalization == "leave_one_out":
        centred = centred * num_rollouts / (num_rollouts - 1)
    return centred.tolist()


def batch_normalized(advantages: Sequence[float]) -> list[float]:
    """Return `(A - mean) / std` over a batch's rollouts or tokens (REINFORCE++, arXiv:2501.03262, equation 10).

    Example:
        >>> [round(value, 4) for value in batch_normalized([0.0, 0.0, 3.0])]
        [-0.5774, -0.5774, 1.1547]
    """
    if len(advantages) < 2:
        return [0.0] * len(advantages)
    values = torch.tensor(advantages, dtype=torch.float64)
    return ((values - values.mean()) / values.std().clamp(min=1e-6)).tolist()


@dataclass(frozen=True, slots=True)
class Baseline:
    """Weighted sum of group advantages that are normalized separately per reward component (GDPO, arXiv:2601.05242).

    Example:
        >>> Baseline("mean", weights=(1.0, 0.5)).advantages([[0.0, 2.0], [10.0, 0.0]])
        [1.5, -1.5]
    """

    normalization: Normalization = "std"
    weights: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        group_advantages([], self.normalization)

    def advantages(self, columns: Sequence[Sequence[float]]) -> list[float]:
        """Return the advantage of each rollout from `[num_columns][num_rollouts]` numbers."""
        totals = [0.0] * len(columns[0])
        for weight, column in zip(self.weights, columns, strict=True):
            for place, advantage in enumerate(group_advantages(column, self.normalization)):
                totals[place] += weight * advantage
        return totals

    def is_constant(self, columns: Sequence[Sequence[float]]) -> bool:
        """Return whether all advantages would be zero."""
        return self.normalization != "none" and all(len(set(column)) == 1 for column in columns)
