"""Selection of each group's best rollouts."""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl.objectives.advantages.group_queue import GroupQueue
from llmrl.objectives.advantages.grouping import GroupKeys, grouped, split_by_group, stack_rows


class TopKRewardSelector(KnownArguments, Transform):
    """Keeps the rollouts with the highest rewards of each group, for expert iteration or rejection sampling.

    A group is identified by `("rollout", "group_id")`. At most `topk_size` of its scored rollouts with rewards above
    the group's mean (TorchRL: median) are kept, best first. In a replay buffer (`inv`, on `extend`) rows are held back
    until `total_dialog_turns` rollouts of their group have arrived. A collector takes `postproc=selector.select`.

    Args:
        total_dialog_turns: number of rollouts in a group, scored or not.
        topk_size: maximum number of rollouts kept per group.
        prompt_key: entry that identifies groups instead of the group id.
        rewards_key, done_key: entries read; turns are handled as in `MCAdvantage`.

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
    ) -> None:
        super().__init__()
        if not 1 <= topk_size <= total_dialog_turns:
            raise ValueError(
                f"topk_size must be from 1 to total_dialog_turns, got {topk_size} with "
                f"total_dialog_turns={total_dialog_turns}."
            )
        self.total_dialog_turns = total_dialog_turns
        self.topk_size = topk_size
        self.keys = GroupKeys(prompt_key, rewards=rewards_key, done=done_key)
        self.queue = GroupQueue(self.keys, total_dialog_turns)
        self.in_keys = self.keys.read

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch unchanged; its rows were selected when they were written."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        selected = self._selected(self.queue.push(self.keys.rows(tensordict)))
        return selected if selected.batch_size.numel() else None

    def select(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rows of the best rollouts in a batch of complete groups."""
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
            by_name = grouped(scored, self.keys.rollout_id)
            kept += [row for name in best[: self.topk_size] for row in by_name[name]]
        return stack_rows(kept)
