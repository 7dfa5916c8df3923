"""Selection of a group's rollouts for training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl._utils.arguments import KnownArguments, check_choice, check_least

SelectionStrategy = Literal["first", "uniform", "balanced", "max_variance"]


def is_within(returns: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Return whether the mean of the returns is strictly within the bounds; always true without bounds."""
    return bounds is None or bounds[0] < sum(returns) / len(returns) < bounds[1]


class MCAdvantageSelector(KnownArguments):
    """Selects `group_size` of a group's candidates by their returns.

    - `first`: in order of arrival;
    - `uniform`: evenly spaced in the sorted returns;
    - `balanced`: mean nearest the middle of `keep_return_bounds`, then the widest range; `uniform` without bounds;
    - `max_variance`: the subset with the greatest variance (PODS, arXiv:2504.13818, theorem 1).

    Args:
        strategy: one of the strategies above.
        max_combinations: maximum number of subsets that `balanced` compares; beyond it, only unions
            of the lowest and the highest returns are compared.
        in_keys: entries that `select` reads: `return` and, for subclasses, `trajectories`, the candidates' rows.

    Example:
        >>> MCAdvantageSelector("max_variance").select([0.5, 0.0, 0.6, 1.0], group_size=2)
        [1, 3]
    """

    def __init__(
        self,
        strategy: SelectionStrategy = "balanced",
        *,
        max_combinations: int = 100_000,
        in_keys: Sequence[NestedKey] | None = None,
    ) -> None:
        check_choice(get_args(SelectionStrategy), strategy=strategy)
        check_least(1, max_combinations=max_combinations)
        if in_keys is not None and not in_keys:
            raise ValueError("in_keys must name at least one entry of the candidates.")
        self.strategy: SelectionStrategy = strategy
        self.max_combinations = max_combinations
        self.in_keys = list(in_keys or ["return"])

    def select(
        self,
        candidates: TensorDictBase | Sequence[float],
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """Return the indices of the selected candidates in ascending order; all if there are at most `group_size`.

        `candidates` are returns, or a TensorDict with the returns in the first of `in_keys`.
        Returns None without candidates, or if the selected mean is not strictly within
        `keep_return_bounds` (DAPO, arXiv:2503.14476, equation 11).
        """
        returns = candidates
        if isinstance(candidates, TensorDictBase):
            found = candidates.get(self.in_keys[0])
            if found.numel() != candidates.numel():
                raise ValueError(f"{self.in_keys[0]!r} must have one number per candidate, got shape {found.shape}.")
            returns = found.flatten().tolist()
        if not len(returns):
            return None
        chosen = self._choose(list(returns), group_size, keep_return_bounds)
        return chosen if is_within([returns[index] for index in chosen], keep_return_bounds) else None

    def _choose(self, returns: list[float], size: int, bounds: tuple[float, float] | None) -> list[int]:
        num = len(returns)
        if num <= size or self.strategy == "first":
            return list(range(min(num, size)))
        ordered = sorted(range(num), key=returns.__getitem__)
        if self.strategy == "uniform" or (self.strategy == "balanced" and bounds is None):
            places = [num // 2] if size == 1 else [round(i * (num - 1) / (size - 1)) for i in range(size)]
            return sorted(ordered[place] for place in places)
        extremes = [ordered[:num_low] + ordered[num - size + num_low :] for num_low in range(size + 1)]
        if self.strategy == "max_variance":
            return sorted(max(extremes, key=lambda subset: _squares([returns[index] for index in subset])))
        assert bounds is not None  # otherwise the choice is uniform
        middle = sum(bounds) / 2
        is_few = math.comb(num, size) <= self.max_combinations
        subsets: Iterable[Iterable[int]] = combinations(range(num), size) if is_few else extremes

        def badness(subset: Iterable[int]) -> tuple[float, float]:
            values = [returns[index] for index in subset]
            return abs(sum(values) / size - middle), min(values) - max(values)

        return sorted(min(subsets, key=badness))


def _squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """Group size, number of candidates and selection rule of a group's rollouts.

    Example:
        >>> CandidateChoice(2, 4, selector=MCAdvantageSelector("max_variance")).choose([0.4, 0.0, 1.0, 0.6])
        [1, 2]
    """

    group_size: int | None = None
    """Number of rollouts to train on; None means all."""
    num_candidates: int | None = None
    """Number of rollouts sampled per group, if larger than `group_size`."""
    min_candidates: int | None = None
    """Number of rollouts required before the first selection."""
    selector: MCAdvantageSelector = field(default_factory=MCAdvantageSelector)
    bounds: tuple[float, float] | None = None
    """Exclusive bounds of the selected rollouts' mean return."""

    def __post_init__(self) -> None:
        size = self.group_size
        check_least(1, grpo_size=size)
        if self.num_candidates is not None and (size is None or self.num_candidates < size):
            raise ValueError(
                f"candidate_group_size must be at least grpo_size, got {self.num_candidates} with grpo_size={size}."
            )
        if self.min_candidates is not None and not (
            size is not None and size <= self.min_candidates <= (self.sampled_size or 0)
        ):
            raise ValueError(
                "candidate_selection_min_size must be from grpo_size to candidate_group_size, got "
                f"{self.min_candidates} with {size} and {self.num_candidates}."
            )
        if self.bounds is not None and not self.bounds[0] < self.bounds[1]:
            raise ValueError(f"keep_return_bounds must be (low, high) with low < high, got {self.bounds}.")

    @property
    def sampled_size(self) -> int | None:
        """Number of rollouts sampled per group, if specified."""
        return self.num_candidates or self.group_size

    @property
    def waited_size(self) -> int | None:
        """Number of rollouts required before the first selection, if groups have a size."""
        return self.min_candidates or self.group_size

    def choose(
        self, returns: Sequence[float], rollouts: Callable[[], Sequence[TensorDictBase]] | None = None
    ) -> Sequence[int] | None:
        """Return the indices of the rollouts to train on, or None if out of bounds; `rollouts` returns their rows."""
        if self.num_candidates is None and self.bounds is None:
            return range(len(returns))
        candidates = TensorDict({"return": torch.tensor(returns, dtype=torch.float64)}, batch_size=[len(returns)])
        if self.selector.in_keys != ["return"]:
            if rollouts is None:
                raise ValueError(
                    f"candidate_selector reads {self.selector.in_keys}, and has_signal has the returns only: leave out "
                    "group_filter, or pass a function of your own."
                )
            candidates.set("trajectories", lazy_stack(list(rollouts()), 0))
        return self.selector.select(
            candidates.select(*self.selector.in_keys),
            group_size=min(len(returns), self.group_size or len(returns)),
            keep_return_bounds=self.bounds,
        )
