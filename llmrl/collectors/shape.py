"""Kinds of batches (groups, tokens, turns, trajectories, last steps) and their assembly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tensordict import TensorDictBase, lazy_stack

from llmrl._utils.arguments import check_least
from llmrl.collectors.gates import DemandGate, LatePolicy, StalenessGate, Surplus
from llmrl.collectors.rows import batch_rows, rollout_rows
from llmrl.data import Rollout
from llmrl.envs import DataLoadingPrimer, DatasetChatEnv, MixedEnv

Kind = Literal["groups", "tokens", "turns", "trajectories", "last_steps"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Size and content of a batch."""

    kind: Kind
    size: int
    """Number of groups, tokens, turns (for trajectories: the minimum) or last steps."""

    @classmethod
    def of(
        cls,
        *,
        groups_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_completed_trajectories: bool | None = None,
        yield_only_last_steps: bool | None = None,
    ) -> BatchShape:
        """Build the shape from a collector's arguments, which include TorchRL's.

        Raises ValueError if the arguments do not define exactly one kind of batch, or if a number is below 1.

        Example:
            >>> BatchShape.of(yield_only_last_steps=True)
            BatchShape(kind='last_steps', size=1)
        """
        if yield_only_last_steps and yield_completed_trajectories is False:
            raise ValueError(
                "yield_only_last_steps yields the last turns of completed trajectories: "
                "leave yield_completed_trajectories=False out."
            )
        is_of_steps = dialog_turns_per_batch is not None or yield_completed_trajectories or yield_only_last_steps
        if (groups_per_batch is not None) + (tokens_per_batch is not None) + bool(is_of_steps) != 1:
            raise ValueError(
                "exactly one kind of batch is needed: groups_per_batch, tokens_per_batch, or "
                "dialog_turns_per_batch, yield_completed_trajectories and yield_only_last_steps."
            )
        check_least(
            1,
            groups_per_batch=groups_per_batch,
            tokens_per_batch=tokens_per_batch,
            dialog_turns_per_batch=dialog_turns_per_batch,
        )
        if groups_per_batch is not None:
            return cls(kind="groups", size=groups_per_batch)
        if tokens_per_batch is not None:
            return cls(kind="tokens", size=tokens_per_batch)
        size = dialog_turns_per_batch or 1
        if yield_only_last_steps:
            return cls(kind="last_steps", size=size)
        return cls(kind="trajectories" if yield_completed_trajectories else "turns", size=size)

    @property
    def is_grouped(self) -> bool:
        """Whether groups are collected, and a batch contains training rows."""
        return self.kind in ("groups", "tokens")

    def demand_gate(self, *, num_extra: int, num_ahead: int, reset_each_batch: bool) -> DemandGate:
        """Return a gate that starts the groups that a requested batch needs."""
        surplus: dict[Kind, Surplus] = {"turns": "carry", "trajectories": "keep"}
        if reset_each_batch:
            surplus["turns"] = "keep"
        return DemandGate(
            self.size,
            surplus=surplus.get(self.kind, "refuse"),
            estimate_units=self.kind == "tokens",
            num_extra=num_extra,
            num_ahead=num_ahead,
            reset_each_batch=reset_each_batch,
        )

    def staleness_gate(self, *, max_staleness: int, late: LatePolicy) -> StalenessGate:
        """Return a gate that runs ahead of training; ValueError if batches vary in rollouts."""
        if self.kind not in ("groups", "last_steps"):
            raise ValueError(
                "max_staleness needs batches of a known number of rollouts: groups_per_batch, or "
                f"yield_only_last_steps; here a batch is {self.size} {self.kind}."
            )
        return StalenessGate(self.size, max_staleness=max_staleness, late=late)

    def units(self, rollouts: Sequence[Rollout]) -> int:
        """Return a group's contribution to a batch, in the unit of `size`."""
        if self.kind in ("turns", "trajectories"):
            return sum(len(rollout.steps) for rollout in rollouts)
        if self.kind == "tokens":
            for rollout in rollouts:
                rollout.rows = rollout.rows or rollout_rows(rollout)
            return sum(row["tokens", "full"].shape[0] for rollout in rollouts for row in rollout.rows)
        if self.kind == "last_steps":
            return sum(bool(rollout.steps) for rollout in rollouts)
        return 1

    def assemble(
        self, groups: Sequence[Sequence[Rollout]], left_over: Sequence[TensorDictBase] = ()
    ) -> tuple[TensorDictBase | None, list[TensorDictBase]]:
        """Return the batch of `left_over` turns and `groups`, and the new surplus turns."""
        if self.is_grouped:
            return batch_rows(groups), []
        steps = [*left_over]
        for rollout in (rollout for group in groups for rollout in group):
            steps += rollout.steps[-1:] if self.kind == "last_steps" else rollout.steps
        end = self.size if self.kind == "turns" else len(steps)
        batch = lazy_stack(steps[:end], 0) if steps else None
        return batch, steps[end:]


def check_group_size(transform: object, dataset_env: DatasetChatEnv | DataLoadingPrimer | MixedEnv | None) -> None:
    """Raise ValueError if advantages expect another group size than the environment's."""
    for part in getattr(transform, "transforms", [transform]):
        size = getattr(part, "sampled_group_size", None)
        if size is not None and dataset_env is not None and size != dataset_env.prompts.num_samples:
            raise ValueError(
                f"{type(part).__name__} is made for groups of {size} (grpo_size, or candidate_group_size), and the "
                f"environment samples each prompt {dataset_env.prompts.num_samples} times (repeats); make them equal."
            )
