"""Group-relative Monte-Carlo advantages."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl._utils.arguments import KnownArguments
from llmrl.data import Rollout
from llmrl.data.ragged import has_entry, ragged_column
from llmrl.objectives.advantages.counters import GroupCounters
from llmrl.objectives.advantages.grouping import (
    GroupKeys,
    GroupQueue,
    TrajectoryReturn,
    by_rollout,
    split_by_group,
    stack_rows,
)
from llmrl.objectives.advantages.normalization import Normalization, batch_normalized, group_advantages
from llmrl.objectives.advantages.selectors import MCAdvantageSelector, is_within
from llmrl.objectives.advantages.turn_credit import (
    on_tokens,
    returns_to_go,
    turn_advantages,
    turn_rewards,
    turn_scales,
    turns_of,
)
from llmrl.objectives.penalties.kl_penalty import KLPenalty

LOSS_MASK_KEY: NestedKey = ("masks", "all_assistant_mask")


class MCAdvantage(KnownArguments, GroupCounters):
    """Writes `"advantage"`, `[1, 1]` a row: the rollout's reward relative to its group.

    A group is what shares `("rollout", "group_id")`, not a prompt's text, which would mix epochs and versions. The
    rows of one rollout count once in the baseline and share its advantage, undivided. Unscored rollouts leave the
    baseline and the batch, and so, unless told otherwise, do groups without signal. This is the one place where that is
    decided, since what is constant depends on what is compared. A collector yields no batch of which nothing is left,
    and collects another one; to have every batch full, hand the decision to it, before a batch is made:
    `group_rules=GroupRules(group_filter=advantages.has_signal)` (dynamic sampling, DAPO, arXiv:2503.14476).

    As a transform of a collector (`forward`) the groups are complete in the batch; a batch that has advantages, such
    as one sampled from a replay buffer, is left alone. Appended to a replay buffer (`inv`, on `extend`) it holds rows
    back until all rollouts of their group have come, as many as its collector delivered, which the rows say, or
    `grpo_size`; without `grpo_size` every group is taken as complete.

    Turns are taken, too, such as those of TorchRL's collectors: they name no rollout, and each has a reward of its own.
    `("next", "done")` ends their trajectories. Where rows have no group id their prompt, `"query"`, is one.

    REINFORCE++ (arXiv:2501.03262) is `normalization="none", normalize_batch=True, kl_penalty=KLPenalty(coeff)`, its
    variant with a group baseline `normalization="mean", normalize_batch=True`, and a KL in the loss. Groups without
    signal are in the batch's mean and deviation, though they are not trained on.

    Args:
        grpo_size: rollouts in a group, scored or not; with candidates, those that are trained on. A collector refuses
            one that contradicts its environment's `repeats`.
        prompt_key: entry that tells groups, in place of the group's id.
        rewards_key, advantage_key, done_key: entries read and written.
        verbose: print a line to stderr about what becomes of groups.
        normalization: see `group_advantages`.
        normalize_batch: then also normalize over the batch, see `batch_normalized`; only for whole batches.
        kl_penalty: subtract each token's KL and that of the tokens after it (`KLPenalty.to_go`) before the batch is
            normalized, over its trained tokens then. The advantage is `[num_tokens]` per row; every group has signal.
        component_weights: weights of entries of `("reward_breakdown", NAME)`. Each component is normalized in its
            group by itself, so that none drowns the others, and then weighted and summed (GDPO, arXiv:2601.05242).
            By default the reward is taken as it is.
        by: `"role"` compares each rollout with those of its group that played the same role: in a game of several
            players each role has a baseline of its own (SPIRAL, arXiv:2506.24119, section 3.3, where it is a running
            mean; here it is the group's, which needs no state).
        gamma: credit by turn, for rows of environments that reward turns: the return of a turn is its reward and
            those after it, discounted by `gamma` a turn, and is compared with that of the same turn of the group's
            others (`turn_advantages`). Of a dense reward what came before a token of the turn is taken off
            (`on_tokens`). The advantage is `[num_tokens]` per row then. By default a rollout is one act.
        trajectory_return: how the rewards of a trajectory's turns make its return. By default each turn is compared
            with the group's by itself. Rows of rollouts carry the return already.
        candidate_group_size: rollouts that a group is sampled with, of which `candidate_selector` chooses `grpo_size`.
        candidate_selection_min_size: rollouts of a group that have come when it is first tried in a replay buffer, by
            default `grpo_size`; while the choice is out of bounds more are waited for, up to `candidate_group_size`.
        candidate_selector: how they are chosen.
        keep_return_bounds: groups with a mean return not strictly within have no signal, either: those that are too
            easy or too hard.
        drop_constant_groups: leave out groups with all returns equal (DAPO, arXiv:2503.14476, equation 11); with
            `normalization="none"` a constant group has signal and stays.
        max_num_waiting_groups: beyond it the oldest incomplete group is dropped, with a warning.
        rollout_key, is_scored_key: entries read.

    Raises:
        ValueError: for an unknown normalization, sizes below one, fewer candidates than `grpo_size`, or `kl_penalty`
            without `normalize_batch`.
        RuntimeError: on use, when a trajectory of turns does not end.

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
        prompt_key: NestedKey | None = None,
        rewards_key: NestedKey = ("next", "reward"),
        advantage_key: NestedKey = "advantage",
        done_key: NestedKey = ("next", "done"),
        verbose: bool = False,
        *,
        normalization: Normalization = "std",
        normalize_batch: bool = False,
        kl_penalty: KLPenalty | None = None,
        component_weights: Mapping[str, float] | None = None,
        by: Literal["role"] | None = None,
        gamma: float | None = None,
        trajectory_return: TrajectoryReturn | None = None,
        candidate_group_size: int | None = None,
        candidate_selection_min_size: int | None = None,
        candidate_selector: MCAdvantageSelector | None = None,
        keep_return_bounds: tuple[float, float] | None = None,
        drop_constant_groups: bool = True,
        max_num_waiting_groups: int = 1024,
        rollout_key: NestedKey = ("rollout", "rollout_id"),
        is_scored_key: NestedKey = ("rollout", "is_scored"),
    ) -> None:
        group_advantages([], normalization)
        for name, value in (("grpo_size", grpo_size), ("max_num_waiting_groups", max_num_waiting_groups)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if trajectory_return not in (None, *get_args(TrajectoryReturn)):
            raise ValueError(
                f"trajectory_return must be one of 'sum', 'max', 'mean' or None, got {trajectory_return!r}."
            )
        if candidate_group_size is not None and (grpo_size is None or candidate_group_size < grpo_size):
            raise ValueError(
                f"candidate_group_size must be at least grpo_size, got {candidate_group_size} with "
                f"grpo_size={grpo_size}."
            )
        num_candidates = candidate_group_size or grpo_size
        if candidate_selection_min_size is not None and not (
            grpo_size is not None and grpo_size <= candidate_selection_min_size <= (num_candidates or 0)
        ):
            raise ValueError(
                "candidate_selection_min_size must be from grpo_size to candidate_group_size, got "
                f"{candidate_selection_min_size} with {grpo_size} and {candidate_group_size}."
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
        if by not in (None, "role"):
            raise ValueError(f"by must be 'role' or None, got {by!r}.")
        if by is not None and (candidate_group_size is not None or candidate_selection_min_size is not None):
            raise ValueError("candidates are chosen of a group, and by='role' compares parts of it: leave one out.")
        if gamma is not None:
            _check_gamma(
                gamma,
                normalize_batch=normalize_batch,
                component_weights=component_weights,
                trajectory_return=trajectory_return,
                candidate_group_size=candidate_group_size,
                keep_return_bounds=keep_return_bounds,
            )
        division = None if by is None else ("rollout", by)
        keys = GroupKeys(prompt_key, rollout_key, is_scored_key, rewards_key, done_key, by=division)
        min_size = candidate_selection_min_size or grpo_size
        super().__init__(None if min_size is None else GroupQueue(keys, min_size, max_num_waiting_groups))
        self.keys = keys
        self.grpo_size = grpo_size
        self.candidate_group_size = candidate_group_size
        self.candidate_selection_min_size = min_size
        self.gamma = gamma
        self.verbose = verbose
        self.trajectory_return = trajectory_return
        self.normalization: Normalization = normalization
        self.normalize_batch = normalize_batch
        self.kl_penalty = kl_penalty
        self.component_weights = dict(component_weights) if component_weights is not None else None
        self.candidate_selector = candidate_selector or MCAdvantageSelector()
        self.keep_return_bounds = keep_return_bounds
        self.drop_constant_groups = drop_constant_groups
        self.prompt_key = prompt_key
        self.rewards_key = rewards_key
        self.done_key = done_key
        self.advantage_key = advantage_key
        self.sampled_group_size = num_candidates
        """Rollouts that each group is sampled with, where that was said."""
        self.in_keys = [rollout_key if prompt_key is None else prompt_key, rewards_key]
        self.out_keys = [advantage_key]

    # Batches

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages into a batch of complete groups; returns the rows that stay, in their order."""
        if has_entry(tensordict, self.advantage_key):
            return tensordict
        with self._lock:
            rows = self.keys.rows(tensordict)
            self._arrived(rows)
            return self._complete(rows, is_final=True) if rows else tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Hold rows back until their group is complete; returns complete groups, or None."""
        if self.normalize_batch:
            raise ValueError(
                "normalize_batch needs whole batches, and a replay buffer is written group by group: give "
                "MCAdvantage to the collector (postproc) instead of appending it to the buffer."
            )
        with self._lock:
            rows = self.keys.rows(tensordict)
            self._arrived(rows)
            complete = self._complete(rows if self.queue is None else self.queue.push(rows))
        return complete if complete.batch_size.numel() else None

    def _arrived(self, rows: list[TensorDictBase]) -> None:
        returns = self.keys.rollout_values([row for row in rows if self.keys.scored(row)], self.keys.rewards)
        self._count(
            completed_trajectories=len({self.keys.rollout_id(row) for row in rows}),
            completed_decisions=len(rows),
            trajectory_return_sum=sum(returns.values()),
            successful_trajectories=sum(value > 0 for value in returns.values()),
        )
        self._stats["trajectory_return_max"] = max(self._stats["trajectory_return_max"], *returns.values(), -math.inf)

    def _complete(self, rows: list[TensorDictBase], *, is_final: bool = False) -> TensorDictBase:
        advantages: dict[Hashable, float] = {}
        dropped: set[Hashable] = set()
        by_turn: set[Hashable] = set()
        for group in split_by_group(rows, self.keys):
            if self.gamma is not None:
                by_turn |= self._settle_by_turn(group, self.gamma)
                continue
            if self.trajectory_return is None and self.keys.are_turns(group):
                by_turn |= self._settle_turns(group)
                continue
            settled, is_dropped = self._settle(group, is_final=is_final)
            advantages |= settled
            dropped.update(settled if is_dropped else ())
        if self.normalize_batch and self.kl_penalty is None:
            advantages = dict(zip(advantages, batch_normalized(list(advantages.values())), strict=True))
        kept = [row for row in rows if self.keys.rollout_id(row) in (advantages.keys() - dropped) | by_turn]
        for row in kept:
            if (rollout_id := self.keys.rollout_id(row)) in advantages:
                shape = row.get(self.keys.rewards).shape if self.keys.are_turns([row]) else (*row.batch_size, 1, 1)
                row.set(self.advantage_key, torch.full(shape, advantages[rollout_id]))
        if self.kl_penalty is not None and kept:
            self._penalize(stack_rows(kept), self.kl_penalty)
        if self.verbose and rows:
            print(f"MCAdvantage: {len(kept)} of {len(rows)} rows stay; {self.get_stats()}", file=sys.stderr)
        return stack_rows(kept)

    def _decided(self, *, is_constant: bool, is_dropped: bool) -> None:
        self._count(
            completed_groups=1, written_groups=not is_dropped, dropped_groups=is_dropped, constant_groups=is_constant
        )

    def _settle_turns(self, rows: list[TensorDictBase]) -> set[Hashable]:
        """Compare each turn's reward with all of its group's; returns the trajectories that stay."""
        of_rollouts = {
            "normalize_batch": self.normalize_batch,
            "component_weights": self.component_weights is not None,
            "keep_return_bounds": self.keep_return_bounds is not None,
            "candidate_group_size": self.candidate_group_size is not None,
        }
        if any(of_rollouts.values()):
            given = " and ".join(name for name, is_given in of_rollouts.items() if is_given)
            raise ValueError(f"{given} compare returns of rollouts, not single turns: pass trajectory_return='sum'.")
        rewards = [row.get(self.keys.rewards) for row in rows]
        values = torch.cat([reward.flatten() for reward in rewards])
        is_constant = self._is_constant([values.tolist()])
        is_dropped = is_constant and self.drop_constant_groups
        self._decided(is_constant=is_constant, is_dropped=is_dropped)
        advantages = torch.tensor(group_advantages(values.tolist(), self.normalization))
        for row, reward, part in zip(rows, rewards, advantages.split([r.numel() for r in rewards]), strict=True):
            row.set(self.advantage_key, part.reshape(reward.shape))
        return set() if is_dropped else {self.keys.rollout_id(row) for row in rows}

    def _settle_by_turn(self, rows: list[TensorDictBase], gamma: float) -> set[Hashable]:
        """Compare each turn's return with that of the group's same turn; returns the rollouts that stay."""
        if self.keys.are_turns(rows):
            raise ValueError("gamma is of training rows; turns have returns by trajectory_return.")
        returns = {
            self.keys.rollout_id(row): returns_to_go(turn_rewards(row), gamma) for row in rows if self.keys.scored(row)
        }
        self._count(unscored_trajectories=len({self.keys.rollout_id(row) for row in rows} - returns.keys()))
        is_constant = self._is_constant(turns_of(list(returns.values())))
        is_dropped = is_constant and self.drop_constant_groups
        self._decided(is_constant=is_constant, is_dropped=is_dropped)
        advantages = turn_advantages(returns, self.normalization)
        scales = turn_scales(returns, self.normalization)
        for row in rows:
            if (rollout_id := self.keys.rollout_id(row)) in advantages:
                row.set(self.advantage_key, on_tokens(row, advantages[rollout_id], scales, LOSS_MASK_KEY))
        return set() if is_dropped else set(returns)

    def _penalize(self, batch: TensorDictBase, kl_penalty: KLPenalty) -> None:
        """Turn the advantages of rollouts into those of tokens."""
        masks = [mask.bool() for mask in ragged_column(batch, LOSS_MASK_KEY)]
        columns = zip(batch.unbind(0), kl_penalty.to_go(batch), masks, strict=True)
        values = [float(row[self.advantage_key]) - penalty[mask] for row, penalty, mask in columns]
        normalized = torch.tensor(batch_normalized(torch.cat(values).tolist()))
        for row, mask, part in zip(
            batch.unbind(0), masks, normalized.split([len(part) for part in values]), strict=True
        ):
            row.set(self.advantage_key, torch.zeros(mask.shape).masked_scatter(mask, part))

    def _settle(self, rows: list[TensorDictBase], *, is_final: bool) -> tuple[dict[Hashable, float], bool]:
        """Return the advantages of a group's rollouts that are in the baseline, and whether they are left out."""
        scored = [row for row in rows if self.keys.scored(row)]
        turns = self.trajectory_return or "sum"
        rewards = self.keys.rollout_values(scored, self.keys.rewards, turns)
        unscored = {self.keys.rollout_id(row) for row in rows} - rewards.keys()
        names = list(rewards)
        chosen = None
        if rewards:
            chosen = self._chosen(list(rewards.values()), scored)
            is_waited_for = not is_final and self.queue is not None
            if chosen is None and is_waited_for and len(rewards) + len(unscored) < (self.sampled_group_size or 0):
                self.queue.put_back(rows)  # type: ignore[union-attr]
                return {}, True
        self._count(unscored_trajectories=len(unscored))
        if chosen is None:
            self._decided(is_constant=False, is_dropped=True)
            return {}, True
        self._count(selected_trajectories=len(chosen), unselected_trajectories=len(names) - len(chosen))
        if len(chosen) < len(names):
            first = list(rewards.values())[: len(chosen)]
            self._count(rescued_groups=not is_within(first, self.keep_return_bounds))
        names = [names[index] for index in chosen]
        columns: dict[NestedKey, float] = {self.keys.rewards: 1.0}
        if self.component_weights is not None:
            columns = {("reward_breakdown", name): weight for name, weight in self.component_weights.items()}
        values = [self.keys.rollout_values(scored, key, turns) for key in columns]
        chosen_values = [[column[name] for name in names] for column in values]
        is_constant = self._is_constant(chosen_values)
        is_dropped = is_constant and self.drop_constant_groups
        self._decided(is_constant=is_constant, is_dropped=is_dropped)
        totals = [0.0] * len(names)
        for weight, column in zip(columns.values(), chosen_values, strict=True):
            for place, advantage in enumerate(group_advantages(column, self.normalization)):
                totals[place] += weight * advantage
        return dict(zip(names, totals, strict=True)), is_dropped

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
        if self.keys.by is not None and len(roles := {rollout.role for rollout in rollouts}) > 1:
            return any(self.has_signal([one for one in rollouts if one.role == role]) for role in roles)
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        chosen = self._chosen([rollout.reward for rollout in scored]) if scored else None
        if chosen is None:
            return False
        columns = [[scored[index].reward for index in chosen]]
        if self.gamma is not None:
            columns = turns_of([returns_to_go(one.turn_rewards, self.gamma) for one in scored])
        if self.component_weights is not None:
            columns = [[scored[index].breakdown[name] for index in chosen] for name in self.component_weights]
        return not (self.drop_constant_groups and self._is_constant(columns))

    def _chosen(self, returns: Sequence[float], rows: Sequence[TensorDictBase] = ()) -> Sequence[int] | None:
        """Return the places of the rollouts that are trained on; None where the group is too easy or too hard."""
        if self.candidate_group_size is None and self.keep_return_bounds is None:
            return range(len(returns))
        candidates = TensorDict({"return": torch.tensor(returns, dtype=torch.float64)}, batch_size=[len(returns)])
        if rows and self.candidate_selector.in_keys != ["return"]:
            candidates.set("trajectories", lazy_stack(by_rollout(rows, self.keys), 0))
        return self.candidate_selector.select(
            candidates.select(*self.candidate_selector.in_keys),
            group_size=min(len(returns), self.grpo_size or len(returns)),
            keep_return_bounds=self.keep_return_bounds,
        )

    def _is_constant(self, columns: Sequence[Sequence[float]]) -> bool:
        """Return whether every advantage would be zero, from the values of each component."""
        is_compared = self.normalization != "none" and self.kl_penalty is None
        return is_compared and all(len(set(column)) == 1 for column in columns)


def _check_gamma(gamma: float, **others: object) -> None:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be from 0 to 1, got {gamma}.")
    if given := [name for name, value in others.items() if value]:
        raise ValueError(f"gamma compares turns, and {', '.join(given)} compare rollouts: leave one out.")
