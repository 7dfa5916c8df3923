"""Which of a group's more numerous candidates are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl._utils.arguments import KnownArguments

SelectionStrategy = Literal["first", "uniform", "balanced", "max_variance"]


def is_within(returns: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Return whether the mean of returns is strictly within bounds; without bounds it always is."""
    return bounds is None or bounds[0] < sum(returns) / len(returns) < bounds[1]


class MCAdvantageSelector(KnownArguments):
    """Chooses `group_size` of a group's more numerous candidates, by their returns.

    - `first`: those that came first;
    - `uniform`: spread evenly over the sorted returns;
    - `balanced`: those with the mean nearest to the middle of `keep_return_bounds`, of these those farthest apart;
      without bounds as `uniform`;
    - `max_variance`: the subset of greatest variance, which is also some of the lowest and some of the highest (PODS,
      arXiv:2504.13818, theorem 1).

    Args:
        strategy: one of these.
        max_combinations: subsets that `balanced` compares; where there are more, those of the lowest and the highest.
        in_keys: entries that `select` is given, of `return` and `trajectories`, the candidates' rows; for subclasses.

    Raises:
        ValueError: if the strategy is unknown, or there is no subset or entry.

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
        if strategy not in get_args(SelectionStrategy):
            raise ValueError(f"strategy must be one of {list(get_args(SelectionStrategy))}, got {strategy!r}.")
        if max_combinations < 1:
            raise ValueError(f"max_combinations must be at least 1, got {max_combinations}.")
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
        """Return the indices of the chosen candidates, ascending, all where there are no more than `group_size`.

        Args:
            candidates: their returns, or a TensorDict with one element each; the first of `in_keys` holds them.
            group_size: how many are chosen.
            keep_return_bounds: None is returned if the choice has no mean strictly within (dynamic sampling, DAPO,
                arXiv:2503.14476, equation 11).

        Raises:
            ValueError: if a candidate has more than one return.
        """
        returns = candidates
        if isinstance(candidates, TensorDictBase):
            found = candidates.get(self.in_keys[0])
            if found.numel() != candidates.numel():
                raise ValueError(f"{self.in_keys[0]!r} must be one number a candidate, got the shape {found.shape}.")
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
        low, high = bounds or (0.0, 0.0)
        is_few = math.comb(num, size) <= self.max_combinations
        subsets: Iterable[Iterable[int]] = combinations(range(num), size) if is_few else extremes

        def badness(subset: Iterable[int]) -> tuple[float, float]:
            values = [returns[index] for index in subset]
            return abs(sum(values) / size - (low + high) / 2), min(values) - max(values)

        return sorted(min(subsets, key=badness))


def _squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


@dataclass(frozen=True, slots=True)
class CandidateChoice:
    """Of how many candidates a group's rollouts are chosen, how, and within which bounds.

    Raises:
        ValueError: if a size is below 1, the sizes contradict each other, or the bounds are not ascending.

    Example:
        >>> CandidateChoice(2, 4, selector=MCAdvantageSelector("max_variance")).choose([0.4, 0.0, 1.0, 0.6])
        [1, 2]
    """

    group_size: int | None = None
    """Rollouts that are trained on; None takes all."""
    num_candidates: int | None = None
    """Rollouts that a group is sampled with, if more."""
    min_candidates: int | None = None
    """Rollouts that have come when a choice is first tried."""
    selector: MCAdvantageSelector = field(default_factory=MCAdvantageSelector)
    bounds: tuple[float, float] | None = None
    """Of the mean return of those chosen, exclusive."""

    def __post_init__(self) -> None:
        size = self.group_size
        if size is not None and size < 1:
            raise ValueError(f"grpo_size must be at least 1, got {size}.")
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
        """Rollouts that a group is sampled with, where that was said."""
        return self.num_candidates or self.group_size

    @property
    def waited_size(self) -> int | None:
        """Rollouts that have come when a choice is first tried, where groups have a size."""
        return self.min_candidates or self.group_size

    def choose(
        self, returns: Sequence[float], rollouts: Callable[[], Sequence[TensorDictBase]] | None = None
    ) -> Sequence[int] | None:
        """Return the places of the rollouts that are trained on; None where the group is too easy or too hard.

        Args:
            returns: return of each candidate.
            rollouts: gives the rows of each, for selectors that read them.
        """
        if self.num_candidates is None and self.bounds is None:
            return range(len(returns))
        candidates = TensorDict({"return": torch.tensor(returns, dtype=torch.float64)}, batch_size=[len(returns)])
        if rollouts is not None and self.selector.in_keys != ["return"]:
            candidates.set("trajectories", lazy_stack(list(rollouts()), 0))
        return self.selector.select(
            candidates.select(*self.selector.in_keys),
            group_size=min(len(returns), self.group_size or len(returns)),
            keep_return_bounds=self.bounds,
        )
