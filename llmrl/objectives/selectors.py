"""Which rollouts of a group are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl.data.ragged import flat_batch
from llmrl.objectives.grouping import GroupKeys, GroupQueue, split_by_group, stack_rows

SelectionStrategy = Literal["first", "uniform", "balanced", "max_variance"]


class MCAdvantageSelector:
    """Chooses `group_size` of a group's more numerous candidates, by their returns.

    - `first`: those that came first;
    - `uniform`: spread evenly over the sorted returns;
    - `balanced`: of the lowest and the highest, as many of each as bring their mean nearest to the middle of
      `keep_return_bounds`, or of the group's own range;
    - `max_variance`: the subset of greatest variance, which is also some of the lowest and some of the highest (PODS,
      arXiv:2504.13818, theorem 1).

    Args:
        strategy: one of these.

    Raises:
        ValueError: for an unknown strategy.

    Example:
        >>> MCAdvantageSelector("max_variance").select([0.5, 0.0, 0.6, 1.0], group_size=2)
        [1, 3]
    """

    def __init__(self, strategy: SelectionStrategy = "balanced") -> None:
        if strategy not in get_args(SelectionStrategy):
            raise ValueError(f"strategy must be one of {list(get_args(SelectionStrategy))}, got {strategy!r}.")
        self.strategy: SelectionStrategy = strategy

    def select(
        self,
        returns: Sequence[float],
        *,
        group_size: int,
        keep_return_bounds: tuple[float, float] | None = None,
    ) -> list[int] | None:
        """Indices of the chosen candidates, ascending, all where there are no more than `group_size`.

        None where their mean return is not strictly within `keep_return_bounds`: the group has nothing to teach
        (dynamic sampling, DAPO, arXiv:2503.14476, equation 11).
        """
        if not returns:
            return None
        chosen = self._choose(returns, group_size, keep_return_bounds)
        if keep_return_bounds is not None:
            low, high = keep_return_bounds
            if not low < sum(returns[index] for index in chosen) / len(chosen) < high:
                return None
        return chosen

    def _choose(self, returns: Sequence[float], size: int, bounds: tuple[float, float] | None) -> list[int]:
        num = len(returns)
        if num <= size or self.strategy == "first":
            return list(range(min(num, size)))
        ordered = sorted(range(num), key=returns.__getitem__)
        if self.strategy == "uniform":
            places = [(num - 1) // 2] if size == 1 else [round(i * (num - 1) / (size - 1)) for i in range(size)]
            return sorted(ordered[place] for place in places)
        low, high = bounds or (returns[ordered[0]], returns[ordered[-1]])
        subsets = [ordered[:num_low] + ordered[num - size + num_low :] for num_low in range(size + 1)]

        def badness(subset: list[int]) -> float:
            values = [returns[index] for index in subset]
            mean = sum(values) / size
            if self.strategy == "balanced":
                return abs(mean - (low + high) / 2)
            return -sum((value - mean) ** 2 for value in values)

        best = min(subsets, key=badness)
        return sorted(best)


class TopKRewardSelector(Transform):
    """Keeps the rollouts of highest reward of each group: expert iteration, rejection sampling.

    A group is what shares `("rollout", "group_id")`. At most `topk_size` of its scored rollouts are kept, and only
    those above the group's mean reward, so that a group without signal leaves nothing, and a group in which half or
    more succeeded still leaves its successes. (TorchRL groups by prompt text and compares with the median, which drops
    a group in which most succeeded.)

    Appended to a replay buffer (`inv`, on `extend`) rows are held back until `total_dialog_turns` rollouts of their
    group have come. A collector, whose groups are complete, takes `postproc=selector.select`.

    Args:
        total_dialog_turns: rollouts in a group, scored or not.
        topk_size: rollouts kept of each.
        max_num_waiting_groups: beyond it the oldest incomplete group is dropped, with a warning.
        group_key, rollout_key, is_scored_key, rewards_key: entries read.

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
        *,
        max_num_waiting_groups: int = 1024,
        group_key: NestedKey = ("rollout", "group_id"),
        rollout_key: NestedKey = ("rollout", "rollout_id"),
        is_scored_key: NestedKey = ("rollout", "is_scored"),
        rewards_key: NestedKey = ("next", "reward"),
    ) -> None:
        super().__init__()
        if not 1 <= topk_size <= total_dialog_turns:
            raise ValueError(
                f"topk_size must be from 1 to total_dialog_turns, got {topk_size} with "
                f"total_dialog_turns={total_dialog_turns}."
            )
        self.total_dialog_turns, self.topk_size = total_dialog_turns, topk_size
        self.keys = GroupKeys(group_key, rollout_key, is_scored_key, rewards_key)
        self.queue = GroupQueue(self.keys, total_dialog_turns, max_num_waiting_groups)
        self.in_keys = [group_key, rollout_key, rewards_key]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Nothing: what is sampled from a buffer was selected when it was written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        selected = self.select(self.queue.push(tensordict))
        return selected if selected.batch_size.numel() else None

    def select(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rows of the best rollouts of a batch of complete groups."""
        if not tensordict.batch_size.numel():
            return tensordict
        kept: list[TensorDictBase] = []
        for rows in split_by_group(flat_batch(tensordict), self.keys):
            scored = [row for row in rows if self.keys.scored(row)]
            rewards = self.keys.rollout_values(scored, self.keys.rewards)
            if not rewards:
                continue
            mean = sum(rewards.values()) / len(rewards)
            best = [name for name in sorted(rewards, key=lambda name: -rewards[name]) if rewards[name] > mean]
            chosen = set(best[: self.topk_size])
            kept += [row for row in scored if self.keys.rollout_id(row) in chosen]
        return stack_rows(kept)
