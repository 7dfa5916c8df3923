"""Which rollouts of a group are trained on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal, get_args

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl.objectives.advantages.grouping import GroupKeys, GroupQueue, split_by_group, stack_rows

SelectionStrategy = Literal["first", "uniform", "balanced", "max_variance"]


def is_within(returns: Sequence[float], bounds: tuple[float, float] | None) -> bool:
    """Return whether the mean of returns is strictly within bounds; without bounds it always is.

    Example:
        >>> is_within([0.0, 1.0], (0.1, 0.9)), is_within([1.0, 1.0], (0.0, 1.0)), is_within([1.0], None)
        (True, False, True)
    """
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
        ValueError: for an unknown strategy, or no subset or entry.

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
            keep_return_bounds: None is returned where no choice has a mean strictly within: the group has nothing to
                teach (dynamic sampling, DAPO, arXiv:2503.14476, equation 11).

        Raises:
            ValueError: when a candidate has more than one return.
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


class TopKRewardSelector(KnownArguments, Transform):
    """Keeps the rollouts of highest reward of each group: expert iteration, rejection sampling.

    A group is what shares `("rollout", "group_id")`. At most `topk_size` of its scored rollouts are kept, the best
    first, and only those above the group's mean reward, so that a group without signal leaves nothing, and a group in
    which half or more succeeded still leaves its successes. (TorchRL groups by prompt text and compares with the
    median, which drops a group in which most succeeded.)

    Appended to a replay buffer (`inv`, on `extend`) rows are held back until `total_dialog_turns` rollouts of their
    group have come. A collector has complete groups and takes `postproc=selector.select`.

    Args:
        total_dialog_turns: rollouts in a group, scored or not.
        topk_size: rollouts kept of each.
        prompt_key: entry that tells groups, in place of their id.
        rewards_key, done_key: entries read; turns, which name no rollout, are taken as `MCAdvantage` takes them.
        max_num_waiting_groups: beyond it the oldest incomplete group is dropped, with a warning.
        rollout_key, is_scored_key: entries read.

    Raises:
        ValueError: when `topk_size` is not within 1 and `total_dialog_turns`.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> rows = [TensorDict({"rollout": {"group_id": "g", "rollout_id": str(i)}, "next": {"reward": [[float(i)]]}})
        ...         for i in range(4)]
        >>> TopKRewardSelector(4, 1).select(lazy_stack(rows))["next", "reward"].flatten().tolist()
        [3.0]
    """

    def __init__(
        self,
        total_dialog_turns: int,
        topk_size: int,
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        done_key: NestedKey = ("next", "done"),
        *,
        max_num_waiting_groups: int = 1024,
        rollout_key: NestedKey = ("rollout", "rollout_id"),
        is_scored_key: NestedKey = ("rollout", "is_scored"),
    ) -> None:
        super().__init__()
        if not 1 <= topk_size <= total_dialog_turns:
            raise ValueError(
                f"topk_size must be from 1 to total_dialog_turns, got {topk_size} with "
                f"total_dialog_turns={total_dialog_turns}."
            )
        self.total_dialog_turns = total_dialog_turns
        self.topk_size = topk_size
        self.keys = GroupKeys(prompt_key, rollout_key, is_scored_key, rewards_key, done_key)
        self.queue = GroupQueue(self.keys, total_dialog_turns, max_num_waiting_groups)
        self.in_keys = [rollout_key if prompt_key is None else prompt_key, rewards_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Do nothing: what is sampled from a buffer was selected when it was written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        selected = self._selected(self.queue.push(self.keys.rows(tensordict)))
        return selected if selected.batch_size.numel() else None

    def select(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rows of the best rollouts of a batch of complete groups."""
        return self._selected(rows) if (rows := self.keys.rows(tensordict)) else tensordict

    def _selected(self, batch: list[TensorDictBase]) -> TensorDictBase:
        kept: list[TensorDictBase] = []
        for rows in split_by_group(batch, self.keys):
            scored = [row for row in rows if self.keys.scored(row)]
            rewards = self.keys.rollout_values(scored, self.keys.rewards)
            if not rewards:
                continue
            mean = sum(rewards.values()) / len(rewards)
            best = [name for name in sorted(rewards, key=lambda name: -rewards[name]) if rewards[name] > mean]
            for name in best[: self.topk_size]:
                kept += [row for row in scored if self.keys.rollout_id(row) == name]
        return stack_rows(kept)
