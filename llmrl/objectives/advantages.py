"""Group-relative Monte-Carlo advantages."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.envs.transforms import Transform

from llmrl.data import Rollout
from llmrl.data.ragged import flat_batch, has_entry, ragged_column
from llmrl.objectives.grouping import GroupKeys, GroupQueue, split_by_group, stack_rows
from llmrl.objectives.kl_penalty import KLPenalty
from llmrl.objectives.selectors import MCAdvantageSelector

Normalization = Literal["std", "mean", "leave_one_out", "none"]


def group_advantages(rewards: Sequence[float], normalization: Normalization = "std") -> list[float]:
    """Advantage of each rollout of one group, from the rewards of its scored rollouts.

    - `std`: `(r - mean) / std` (GRPO, arXiv:2402.03300, section 4.1.2), the unbiased standard deviation;
    - `mean`: `r - mean` (Dr. GRPO, arXiv:2503.20783, section 3.2);
    - `leave_one_out`: `r` minus the mean of the others (RLOO, arXiv:2402.14740, section 3.3);
    - `none`: `r`, for a baseline of the whole batch, see `batch_normalized`.

    But for `none`, a group whose rewards are all equal, or of one rollout, has no signal: zeros.

    Raises:
        ValueError: for an unknown normalization.

    Example:
        >>> group_advantages([0.0, 1.0], "mean"), group_advantages([0.0, 0.0, 1.0], "leave_one_out")
        ([-0.5, 0.5], [-0.5, -0.5, 1.0])
    """
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization must be one of {list(get_args(Normalization))}, got {normalization!r}.")
    if normalization == "none":
        return [float(reward) for reward in rewards]
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


def batch_normalized(advantages: Sequence[float]) -> list[float]:
    """`(A - mean) / std` over the rollouts, or tokens, of a batch (REINFORCE++, arXiv:2501.03262, equation 10).

    Example:
        >>> [round(value, 4) for value in batch_normalized([0.0, 0.0, 3.0])]
        [-0.5774, -0.5774, 1.1547]
    """
    if len(advantages) < 2:
        return [0.0] * len(advantages)
    values = torch.tensor(advantages, dtype=torch.float64)
    return ((values - values.mean()) / values.std().clamp(min=1e-6)).tolist()


class MCAdvantage(Transform):
    """Writes `"advantage"`, `[1, 1]` a row: the rollout's reward relative to its group.

    A group is what shares `("rollout", "group_id")`, never a prompt's text, which would mix epochs and versions. The
    rows of one rollout count once in the baseline and share its advantage, undivided. Unscored rollouts leave the
    baseline and the batch, and so, unless told otherwise, do groups without signal. This is the one place where that is
    decided, since what is constant depends on what is compared. A collector yields no batch of which nothing is left,
    and collects another one; to have every batch full, hand the decision to it, before a batch is made:
    `group_rules=GroupRules(group_filter=advantages.has_signal)` (dynamic sampling, DAPO, arXiv:2503.14476).

    As a transform of a collector (`forward`) the groups are complete in the batch; a batch that has advantages, such
    as one sampled from a replay buffer, is left alone. Appended to a replay buffer (`inv`, on `extend`) it holds rows
    back until all rollouts of their group have come, as many as its collector delivered, which the rows say, or
    `grpo_size`; without `grpo_size` every group is taken as complete.

    REINFORCE++ (arXiv:2501.03262) is `normalization="none", normalize_batch=True, kl_penalty=KLPenalty(coeff)`, its
    variant with a group baseline `normalization="mean", normalize_batch=True`, and a KL in the loss. Groups without
    signal are in the batch's mean and deviation, though they are not trained on.

    Args:
        grpo_size: rollouts in a group, scored or not; with candidates, those that are trained on. A collector refuses
            one that contradicts its environment's `repeats`.
        normalization: see `group_advantages`.
        normalize_batch: then also normalize over the batch, see `batch_normalized`; only for whole batches.
        kl_penalty: subtract each token's KL and that of the tokens after it (`KLPenalty.to_go`) before the batch is
            normalized, over its trained tokens then. The advantage is `[num_tokens]` a row; every group has signal.
        component_weights: weights of entries of `("reward_breakdown", NAME)`. Each component is normalized in its
            group by itself, so that none drowns the others, and then weighted and summed (GDPO, arXiv:2601.05242).
            By default the reward is taken as it is.
        candidate_group_size: rollouts that a group is sampled with, of which `candidate_selector` chooses `grpo_size`.
        candidate_selector: how.
        keep_return_bounds: groups whose mean return is not strictly within have no signal, either: those that are too
            easy or too hard.
        drop_constant_groups: leave out groups whose returns are all equal (DAPO, arXiv:2503.14476, equation 11); with
            `normalization="none"` a constant group has signal and stays.
        max_num_waiting_groups: beyond it the oldest incomplete group is dropped, with a warning.
        group_key, rollout_key, is_scored_key, rewards_key, advantage_key: entries read and written.

    Raises:
        ValueError: for an unknown normalization, sizes below one, fewer candidates than `grpo_size`, or `kl_penalty`
            without `normalize_batch`.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
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
        normalize_batch: bool = False,
        kl_penalty: KLPenalty | None = None,
        component_weights: Mapping[str, float] | None = None,
        candidate_group_size: int | None = None,
        candidate_selector: MCAdvantageSelector | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
        drop_constant_groups: bool = True,
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
        if candidate_group_size is not None and (grpo_size is None or candidate_group_size < grpo_size):
            raise ValueError(
                f"candidate_group_size must be at least grpo_size, got {candidate_group_size} with "
                f"grpo_size={grpo_size}."
            )
        if keep_return_bounds is not None and not keep_return_bounds[0] < keep_return_bounds[1]:
            raise ValueError(f"keep_return_bounds must be (low, high) with low < high, got {keep_return_bounds}.")
        if component_weights is not None and not component_weights:
            raise ValueError("component_weights must name at least one entry of 'reward_breakdown'.")
        if kl_penalty is not None and not normalize_batch:
            raise ValueError(
                "kl_penalty needs normalize_batch=True; a KL that is not normalized with the reward belongs into "
                "the reward (KLPenalty before MCAdvantage) or the loss (GRPOLoss(kl_to_ref_coeff=))."
            )
        self.grpo_size, self.candidate_group_size = grpo_size, candidate_group_size
        self.normalization: Normalization = normalization
        self.normalize_batch, self.kl_penalty = normalize_batch, kl_penalty
        self.component_weights = dict(component_weights) if component_weights is not None else None
        self.candidate_selector = candidate_selector or MCAdvantageSelector()
        self.keep_return_bounds = keep_return_bounds
        self.drop_constant_groups = drop_constant_groups
        self.advantage_key = advantage_key
        self.keys = GroupKeys(group_key, rollout_key, is_scored_key, rewards_key)
        self.queue: GroupQueue | None = None
        """The incomplete groups held back, where groups have a size."""
        if grpo_size is not None:
            self.queue = GroupQueue(self.keys, candidate_group_size or grpo_size, max_num_waiting_groups)
        self.sampled_group_size = candidate_group_size or grpo_size
        """Rollouts that each group is sampled with, where that was said."""
        self.in_keys = [group_key, rollout_key, rewards_key]
        self.out_keys = [advantage_key]
        self.num_groups = 0
        """Groups given advantages so far."""
        self.num_constant_groups = 0
        """Groups without signal so far."""
        self.num_rejected_groups = 0
        """Groups out of `keep_return_bounds` so far."""
        self.num_unscored_rollouts = 0

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages into a batch of complete groups; returns the rows that stay, in their order."""
        if has_entry(tensordict, self.advantage_key):
            return tensordict
        return self._complete(tensordict)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold rows back until their group is complete; returns complete groups, or None."""
        if self.normalize_batch:
            raise ValueError(
                "normalize_batch needs whole batches, and a replay buffer is written group by group: give "
                "MCAdvantage to the collector (postproc) instead of appending it to the buffer."
            )
        complete = self._complete(tensordict if self.queue is None else self.queue.push(tensordict))
        return complete if complete.batch_size.numel() else None

    def _complete(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not tensordict.batch_size.numel():
            return tensordict
        batch = flat_batch(tensordict)
        advantages: dict[Hashable, float] = {}
        dropped: set[Hashable] = set()
        for rows in split_by_group(batch, self.keys):
            settled, is_dropped = self._settle(rows)
            advantages |= settled
            dropped.update(settled if is_dropped else ())
        if self.normalize_batch and self.kl_penalty is None:
            advantages = dict(zip(advantages, batch_normalized(list(advantages.values())), strict=True))
        kept = [row for row in batch.unbind(0) if self.keys.rollout_id(row) in advantages.keys() - dropped]
        for row in kept:
            advantage = advantages[self.keys.rollout_id(row)]
            row.set(self.advantage_key, torch.full((*row.batch_size, 1, 1), advantage))
        if self.kl_penalty is not None and kept:
            self._penalize(stack_rows(kept), self.kl_penalty)
        return stack_rows(kept)

    def _penalize(self, batch: TensorDictBase, kl_penalty: KLPenalty) -> None:
        """Turn the advantages of rollouts into those of tokens."""
        masks = [mask.bool() for mask in ragged_column(batch, kl_penalty.mask_key)]
        columns = zip(batch.unbind(0), kl_penalty.to_go(batch), masks, strict=True)
        values = [float(row[self.advantage_key]) - penalty[mask] for row, penalty, mask in columns]
        normalized = torch.tensor(batch_normalized(torch.cat(values).tolist()))
        for row, mask, part in zip(
            batch.unbind(0), masks, normalized.split([len(part) for part in values]), strict=True
        ):
            row.set(self.advantage_key, torch.zeros(mask.shape).masked_scatter(mask, part))

    def _settle(self, rows: list[TensorDictBase]) -> tuple[dict[Hashable, float], bool]:
        """Return the advantages of a group's rollouts that are in the baseline, and whether they are left out."""
        scored = [row for row in rows if self.keys.scored(row)]
        rewards = self.keys.rollout_values(scored, self.keys.rewards)
        unscored = {self.keys.rollout_id(row) for row in rows if not self.keys.scored(row)}
        self.num_unscored_rollouts += len(unscored)
        if not rewards:
            return {}, True
        self.num_groups += 1
        names = list(rewards)
        chosen = self._chosen(list(rewards.values()))
        if chosen is None:
            self.num_rejected_groups += 1
            return {}, True
        names = [names[index] for index in chosen]
        columns: dict[NestedKey, float] = {self.keys.rewards: 1.0}
        if self.component_weights is not None:
            columns = {("reward_breakdown", name): weight for name, weight in self.component_weights.items()}
        values = [self.keys.rollout_values(scored, key) for key in columns]
        chosen_values = [[column[name] for name in names] for column in values]
        is_constant = self._is_constant(chosen_values)
        self.num_constant_groups += is_constant
        totals = [0.0] * len(names)
        for weight, column in zip(columns.values(), chosen_values, strict=True):
            for place, advantage in enumerate(group_advantages(column, self.normalization)):
                totals[place] += weight * advantage
        return dict(zip(names, totals, strict=True)), is_constant and self.drop_constant_groups

    def has_signal(self, rollouts: Sequence[Rollout]) -> bool:
        """Return whether anything of a collected group would stay in its batch; for `GroupRules(group_filter=)`.

        Raises:
            KeyError: when a rollout has no component of `component_weights`.

        Example:
            >>> group = [Rollout(rollout_id=str(i), group_id="g", sample_index=i, group_size=2, is_scored=True)
            ...          for i in range(2)]
            >>> MCAdvantage().has_signal(group), MCAdvantage(drop_constant_groups=False).has_signal(group)
            (False, True)
        """
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        chosen = self._chosen([rollout.reward for rollout in scored]) if scored else None
        if chosen is None:
            return False
        columns = [[scored[index].reward for index in chosen]]
        if self.component_weights is not None:
            columns = [[scored[index].breakdown[name] for index in chosen] for name in self.component_weights]
        return not (self.drop_constant_groups and self._is_constant(columns))

    def _chosen(self, returns: Sequence[float]) -> Sequence[int] | None:
        """Places of the rollouts that are trained on; None where the group is too easy or too hard."""
        if self.candidate_group_size is None and self.keep_return_bounds is None:
            return range(len(returns))
        return self.candidate_selector.select(
            returns,
            group_size=len(returns) if self.candidate_group_size is None else self.grpo_size or len(returns),
            keep_return_bounds=self.keep_return_bounds,
        )

    def _is_constant(self, columns: Sequence[Sequence[float]]) -> bool:
        """Return whether every advantage would be zero, from the values of each component."""
        is_compared = self.normalization != "none" and self.kl_penalty is None
        return is_compared and all(len(set(column)) == 1 for column in columns)
