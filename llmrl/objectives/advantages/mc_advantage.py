"""Group-relative Monte Carlo advantages."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from llmrl._utils.arguments import KnownArguments
from llmrl.data import Rollout
from llmrl.data.keys import LOSS_MASK_KEY
from llmrl.data.ragged import has_entry, ragged_column
from llmrl.objectives.advantages.candidates import CandidateChoice, MCAdvantageSelector, is_within
from llmrl.objectives.advantages.counters import GroupCounters
from llmrl.objectives.advantages.group_queue import GroupQueue
from llmrl.objectives.advantages.grouping import GroupKeys, TrajectoryReturn, by_rollout, split_by_group, stack_rows
from llmrl.objectives.advantages.normalization import Baseline, Normalization, batch_normalized, group_advantages
from llmrl.objectives.advantages.turn_credit import (
    on_tokens,
    returns_to_go,
    turn_advantages,
    turn_returns,
    turn_scales,
    turns_of,
)
from llmrl.objectives.penalties.kl_penalty import KLPenalty

Settled = tuple[dict[Hashable, float], set[Hashable]]
"""Advantages of a group's rollouts (empty if written per turn or token already), and the rollouts that are kept."""


class MCAdvantage(KnownArguments, GroupCounters):
    """Writes `"advantage"`, `[1, 1]` per row: the rollout's reward relative to its group.

    A group is identified by `("rollout", "group_id")`, or by the prompt `"query"` if rows have none. The rows of a
    rollout share its advantage and count once in the baseline. Unscored rollouts are removed from the batch and, by
    default, so are groups without signal. To get full batches, filter groups during collection:
    `group_rules=GroupRules(group_filter=advantages.has_signal)` (dynamic sampling, DAPO, arXiv:2503.14476).

    In a collector (`forward`) a batch has complete groups; a batch that already has advantages is returned as is. In a
    replay buffer (`inv`, on `extend`) rows are held back until their group is complete. Its size is
    the number in the rows or `grpo_size`; without `grpo_size` every group counts as complete.

    Turns without a rollout id, such as those of TorchRL's collectors, have their own rewards. Their
    trajectories end at `("next", "done")`; RuntimeError is raised if the last trajectory does not
    end, in a batch `[num_envs, time]` that of each environment.

    REINFORCE++ (arXiv:2501.03262) is `normalization="none", normalize_batch=True, kl_penalty=KLPenalty(coeff)`; its
    variant with a group baseline is `normalization="mean", normalize_batch=True` with a KL in the
    loss. The batch's mean and deviation include groups without signal.

    Args:
        grpo_size: number of rollouts in a group, scored or not; with candidates, number to train
            on. A collector requires that it matches the environment's `repeats`.
        prompt_key: entry that identifies groups instead of the group id.
        rewards_key, advantage_key, done_key: entries read and written.
        verbose: whether to print statistics of groups to stderr.
        normalization: normalization of `group_advantages`.
        normalize_batch: whether to also normalize over the batch (`batch_normalized`); only for whole batches.
        kl_penalty: penalty for the KL of each token and all later ones (`KLPenalty.to_go`),
            subtracted before the normalization over the batch's trained tokens. The advantage is
            then `[num_tokens]` per row, and every group has signal.
        component_weights: weights of the entries `("reward_breakdown", NAME)`, which are normalized separately in the
            group and then summed (GDPO, arXiv:2601.05242). By default the total reward is used.
        by: `"role"` compares each rollout only with those of its group in the same role (SPIRAL,
            arXiv:2506.24119, section 3.3, with the group's mean instead of a running mean).
        gamma: discount per turn, for rows with turn rewards: each turn's return-to-go is compared with that of the
            same turn in the group's other rollouts (`turn_advantages`, `on_tokens`), and the
            advantage is `[num_tokens]` per row. None gives each rollout one advantage.
        trajectory_return: reduction of turn rewards to the return of a trajectory; None compares
            each turn's reward with all turns of the group. Only for turns.
        candidate_group_size: number of rollouts sampled per group, from which `candidate_selector` selects `grpo_size`.
        candidate_selection_min_size: number of rollouts required for a first selection in a replay buffer, by default
            `grpo_size`; if the selection is out of bounds, more rollouts are awaited, up to `candidate_group_size`.
        candidate_selector: selection rule.
        keep_return_bounds: exclusive bounds of the mean return; other groups are dropped.
        drop_constant_groups: whether to drop groups with equal returns (DAPO, equation 11); without
            effect for `normalization="none"` and `kl_penalty`.

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
    ) -> None:
        components = None if component_weights is None else dict(component_weights)
        baseline = Baseline(normalization, (1.0,) if components is None else tuple(components.values()))
        candidates = CandidateChoice(
            group_size=grpo_size,
            num_candidates=candidate_group_size,
            min_candidates=candidate_selection_min_size,
            selector=candidate_selector or MCAdvantageSelector(),
            bounds=keep_return_bounds,
        )
        keys = GroupKeys(prompt_key, rewards=rewards_key, done=done_key, by=None if by is None else ("rollout", by))
        queue = None
        if candidates.waited_size is not None:
            queue = GroupQueue(keys, candidates.waited_size)
        super().__init__(queue)
        self.keys = keys
        self.baseline = baseline
        self.candidates = candidates
        self.components = components
        self.normalize_batch = normalize_batch
        self.kl_penalty = kl_penalty
        self.gamma = gamma
        self.trajectory_return = trajectory_return
        self.drop_constant_groups = drop_constant_groups
        self.verbose = verbose
        self.advantage_key = advantage_key
        self.in_keys = keys.read
        self.out_keys = [advantage_key]
        self._check(by)

    def _check(self, by: str | None) -> None:
        """Raise ValueError for unknown values and contradictory options."""
        if self.trajectory_return not in (None, *get_args(TrajectoryReturn)):
            raise ValueError(
                f"trajectory_return must be one of 'sum', 'max', 'mean' or None, got {self.trajectory_return!r}."
            )
        if by not in (None, "role"):
            raise ValueError(f"by must be 'role' or None, got {by!r}.")
        if self.components == {}:
            raise ValueError("component_weights must name at least one entry of 'reward_breakdown'.")
        if self.kl_penalty is not None and not self.normalize_batch:
            raise ValueError(
                "kl_penalty needs normalize_batch=True; a KL that is not normalized with the reward belongs in the "
                "reward (KLPenalty before MCAdvantage) or the loss (GRPOLoss(kl_to_ref_coeff=))."
            )
        is_chosen = self.candidates.num_candidates is not None or self.candidates.min_candidates is not None
        if by is not None and is_chosen:
            raise ValueError(
                "candidates are chosen within a group, but by='role' compares parts of a group: pass only one of them."
            )
        if self.gamma is None:
            return
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be from 0 to 1, got {self.gamma}.")
        given = self._options_of_rollouts()
        if self.trajectory_return is not None:
            given.append("trajectory_return")
        if given:
            raise ValueError(f"gamma compares turns, and {', '.join(given)} compare rollouts: pass only one kind.")

    def _options_of_rollouts(self) -> list[str]:
        """Return the given options that require one return per rollout."""
        options = {
            "normalize_batch": self.normalize_batch,
            "component_weights": self.components is not None,
            "keep_return_bounds": self.candidates.bounds is not None,
            "candidate_group_size": self.candidates.num_candidates is not None,
        }
        return [name for name, is_given in options.items() if is_given]

    @property
    def sampled_group_size(self) -> int | None:
        """Number of rollouts sampled per group, if specified."""
        return self.candidates.sampled_size

    # Batches

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write advantages into a batch of complete groups and return the remaining rows in order."""
        if has_entry(tensordict, self.advantage_key):
            return tensordict
        with self._lock:
            rows = self.keys.rows(tensordict)
            self._arrived(rows)
            return self._complete(rows, is_final=True) if rows else tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Queue rows and return complete groups, or None."""
        if self.normalize_batch:
            raise ValueError(
                "normalize_batch needs whole batches, but a replay buffer is written group by group: pass MCAdvantage "
                "to the collector (postproc) instead of appending it to the buffer."
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
        """Write the advantages of complete groups and return the remaining rows."""
        advantages: dict[Hashable, float] = {}
        staying: set[Hashable] = set()
        for group in split_by_group(rows, self.keys):
            if self.gamma is not None:
                settled = self._settle_by_turn(group, self.gamma)
            elif self.trajectory_return is None and self.keys.are_turns(group):
                settled = self._settle_turns(group)
            else:
                settled = self._settle(group, is_final=is_final)
            advantages |= settled[0]
            staying |= settled[1]
        if self.normalize_batch and self.kl_penalty is None:
            advantages = dict(zip(advantages, batch_normalized(list(advantages.values())), strict=True))
        kept = [row for row in rows if self.keys.rollout_id(row) in staying]
        for row in kept:
            if (rollout_id := self.keys.rollout_id(row)) in advantages:
                shape = row.get(self.keys.rewards).shape if self.keys.are_turns([row]) else (*row.batch_size, 1, 1)
                row.set(self.advantage_key, torch.full(shape, advantages[rollout_id]))
        if self.kl_penalty is not None and kept:
            self._penalize(stack_rows(kept), self.kl_penalty)
        if self.verbose and rows:
            print(f"MCAdvantage: {len(kept)} of {len(rows)} rows stay; {self.get_stats()}", file=sys.stderr)
        return stack_rows(kept)

    def _penalize(self, batch: TensorDictBase, kl_penalty: KLPenalty) -> None:
        """Replace the rollouts' advantages with token advantages, penalized by the KL and normalized over the batch."""
        masks = [mask.bool() for mask in ragged_column(batch, LOSS_MASK_KEY)]
        columns = zip(batch.unbind(0), kl_penalty.to_go(batch), masks, strict=True)
        values = [float(row[self.advantage_key]) - penalty[mask] for row, penalty, mask in columns]
        normalized = torch.tensor(batch_normalized(torch.cat(values).tolist()))
        parts = normalized.split([len(part) for part in values])
        for row, mask, part in zip(batch.unbind(0), masks, parts, strict=True):
            row.set(self.advantage_key, torch.zeros(mask.shape).masked_scatter(mask, part))

    # Groups

    def _settle(self, rows: list[TensorDictBase], *, is_final: bool) -> Settled:
        """Compare the returns of a group's rollouts."""
        scored = [row for row in rows if self.keys.scored(row)]
        turns = self.trajectory_return or "sum"
        returns = self.keys.rollout_values(scored, self.keys.rewards, turns)
        num_unscored = len({self.keys.rollout_id(row) for row in rows} - returns.keys())
        chosen = None
        if returns:
            chosen = self.candidates.choose(list(returns.values()), lambda: by_rollout(scored, self.keys))
            # Without candidates the queue has waited for the whole group, of which `rows` may be a part (by="role").
            num_sampled = self.candidates.num_candidates
            num_here = len(returns) + num_unscored
            may_grow = num_sampled is not None and num_here < self.keys.size(rows[-1], num_sampled)
            if chosen is None and may_grow and self.queue is not None and not is_final:
                self.queue.put_back(rows)
                return {}, set()
        self._count(unscored_trajectories=num_unscored)
        if chosen is None:
            self._decided(is_constant=False, is_dropped=True)
            return {}, set()
        self._count(selected_trajectories=len(chosen), unselected_trajectories=len(returns) - len(chosen))
        if len(chosen) < len(returns):
            first = list(returns.values())[: len(chosen)]
            self._count(rescued_groups=not is_within(first, self.candidates.bounds))
        keys: list[NestedKey] = [self.keys.rewards]
        if self.components is not None:
            keys = [("reward_breakdown", name) for name in self.components]
        names = list(returns)
        names = [names[index] for index in chosen]
        values = [self.keys.rollout_values(scored, key, turns) for key in keys]
        columns = [[column[name] for name in names] for column in values]
        kept = self._kept(names, columns)
        return dict(zip(names, self.baseline.advantages(columns), strict=True)), kept

    def _settle_turns(self, rows: list[TensorDictBase]) -> Settled:
        """Compare each turn's reward with the rewards of all turns of its group."""
        if given := self._options_of_rollouts():
            raise ValueError(
                f"{' and '.join(given)} compare returns of rollouts, not single turns: pass trajectory_return='sum'."
            )
        unscored = {self.keys.rollout_id(row) for row in rows if not self.keys.scored(row)}
        self._count(unscored_trajectories=len(unscored))
        rows = [row for row in rows if self.keys.rollout_id(row) not in unscored]
        if not rows:
            self._decided(is_constant=False, is_dropped=True)
            return {}, set()
        rewards = [row.get(self.keys.rewards) for row in rows]
        values = torch.cat([reward.flatten() for reward in rewards]).tolist()
        kept = self._kept(map(self.keys.rollout_id, rows), [values])
        advantages = torch.tensor(group_advantages(values, self.baseline.normalization))
        parts = advantages.split([reward.numel() for reward in rewards])
        for row, reward, part in zip(rows, rewards, parts, strict=True):
            row.set(self.advantage_key, part.reshape(reward.shape))
        return {}, kept

    def _settle_by_turn(self, rows: list[TensorDictBase], gamma: float) -> Settled:
        """Compare each turn's return with those of the same turn in the group's other rollouts."""
        if self.keys.are_turns(rows):
            raise ValueError("gamma applies to training rows; for turns use trajectory_return.")
        returns = {self.keys.rollout_id(row): turn_returns(row, gamma) for row in rows if self.keys.scored(row)}
        self._count(unscored_trajectories=len({self.keys.rollout_id(row) for row in rows} - returns.keys()))
        kept = self._kept(returns, turns_of(list(returns.values())))
        advantages = turn_advantages(returns, self.baseline.normalization)
        scales = turn_scales(returns, self.baseline.normalization)
        for row in rows:
            if (rollout_id := self.keys.rollout_id(row)) in advantages:
                row.set(self.advantage_key, on_tokens(row, advantages[rollout_id], scales, LOSS_MASK_KEY))
        return {}, kept

    def _kept(self, rollouts: Iterable[Hashable], columns: Sequence[Sequence[float]]) -> set[Hashable]:
        """Count a group and return its rollouts, or none if the group is dropped, given the numbers to compare."""
        is_constant = self._is_constant(columns)
        is_dropped = is_constant and self.drop_constant_groups
        self._decided(is_constant=is_constant, is_dropped=is_dropped)
        return set() if is_dropped else set(rollouts)

    def _is_constant(self, columns: Sequence[Sequence[float]]) -> bool:
        """Return whether a group has no signal; with a KL penalty every group has signal."""
        return self.kl_penalty is None and self.baseline.is_constant(columns)

    def _decided(self, *, is_constant: bool, is_dropped: bool) -> None:
        self._count(
            completed_groups=1, written_groups=not is_dropped, dropped_groups=is_dropped, constant_groups=is_constant
        )

    def has_signal(self, rollouts: Sequence[Rollout]) -> bool:
        """Return whether any rollout of a collected group would stay in a batch; for `GroupRules(group_filter=)`.

        Example:
            >>> group = [Rollout(rollout_id=str(i), group_id="g", sample_index=i, group_size=2, is_scored=True)
            ...          for i in range(2)]
            >>> MCAdvantage().has_signal(group), MCAdvantage(drop_constant_groups=False).has_signal(group)
            (False, True)
        """
        if self.keys.by is not None and len(roles := {rollout.role for rollout in rollouts}) > 1:
            return any(self.has_signal([one for one in rollouts if one.role == role]) for role in roles)
        scored = [rollout for rollout in rollouts if rollout.is_scored]
        chosen = self.candidates.choose(_as_stored(rollout.reward for rollout in scored)) if scored else None
        if chosen is None:
            return False
        columns = [_as_stored(scored[index].reward for index in chosen)]
        if self.gamma is not None:
            columns = turns_of(
                [returns_to_go(_as_stored(one.turn_rewards), self.gamma, one.turn_parents) for one in scored]
            )
        if self.components is not None:
            columns = [_as_stored(scored[index].breakdown[name] for index in chosen) for name in self.components]
        return not (self.drop_constant_groups and self._is_constant(columns))


def _as_stored(values: Iterable[float]) -> list[float]:
    """Return numbers as rows hold them, in float32: rewards that are equal there have no signal."""
    return torch.tensor(list(values), dtype=torch.float32).tolist()
