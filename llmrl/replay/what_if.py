"""`what_if`: compares recorded steps with the same steps under a change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import torch
from tensordict import TensorDictBase

from llmrl._utils.types import StateDict
from llmrl.data.tensordicts import plain
from llmrl.objectives.advantages.grouping import stack_rows
from llmrl.replay.loop import Computed, OnStep, ReplayLoop, compute_on_ranks, pass_over, whole
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rewards import advantages_of, own_rubric, score_again
from llmrl.viewer.run_data import Record
from llmrl.watch.tracking import is_performance

Advantages = Mapping[str, float]
"""Advantages by rollout id."""


_NEAR_ZERO = 1e-5


@dataclass(slots=True)
class ChangedStep:
    """A recorded step and the same step under a change."""

    step: int
    metrics: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    """Metrics of the updates, without and with the change."""
    advantages: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Advantage of each trained rollout, before and after; 0 for a rollout that is left out."""
    rewards: dict[str, float] = field(default_factory=dict)
    """New reward of each scored rollout, if another reward function was given."""
    left_out: list[str] = field(default_factory=list)
    """Ids of the rollouts with an advantage now and, for lack of a signal, no row in the run."""

    @property
    def turned(self) -> list[str]:
        """Ids of the rollouts with an advantage of another sign."""
        pairs = self.advantages.items()
        return [name for name, (before, after) in pairs if _sign(before) != _sign(after)]


@dataclass(slots=True)
class WhatIf:
    """Consecutive steps and the same steps under a change, from the same weights."""

    steps: list[ChangedStep] = field(default_factory=list)
    gradient_cosine: float | None = None
    """Cosine of the first update's gradients; None if one was skipped or the models differ."""
    update_cosine: float | None = None
    """Cosine of the changes of the weights; None if one is zero or the models differ."""
    update_ratio: float | None = None
    """Norm of the changed update by that of the recorded one; None like `update_cosine`."""

    def as_json(self) -> dict[str, object]:
        """Return the result as JSON."""
        steps = [{**asdict(step), "turned": step.turned} for step in self.steps]
        return {
            "steps": steps,
            "gradient_cosine": self.gradient_cosine,
            "update_cosine": self.update_cosine,
            "update_ratio": self.update_ratio,
        }


def what_if(
    run: RecordedRun,
    step: int,
    *,
    last_step: int | None = None,
    changes: Sequence[str] = (),
    reward: str | None = None,
    drop_rollouts: Sequence[str] = (),
    on_step: OnStep = pass_over,
) -> WhatIf:
    """Compute a recorded step without and with a change, from the same weights.

    With several steps, each side continues with its own weights, on the answers that the run sampled.

    Args:
        last_step: last of several consecutive steps; one step by default.
        changes: entries of the configuration, such as `loss=dapo` or `train.clip_epsilon=0.3`. With
            `model.path`, the changed side begins with that model and a new optimizer.
        reward: `FILE.py:FUNCTION` that scores the recorded answers; replaces the recorded rewards.
        drop_rollouts: ids of rollouts to leave out of the batch and the baseline.
        on_step: callback that receives the number of each step before it is computed.

    Raises:
        ValueError: if a step was not logged or its batch was not kept, if an entry or a rollout is
            unknown, if the adapters are changed, or if there is no change.
    """
    if not changes and reward is None and not drop_rollouts:
        raise ValueError("nothing is changed: give changes, reward or drop_rollouts.")
    steps = range(step, (step if last_step is None else last_step) + 1)
    if not steps:
        raise ValueError(f"last_step must be at least step={step}, got {last_step}.")
    for one in steps:
        run.check_step(one)
    cfg = run.config(changes)
    if cfg.model.path == run.config().model.path and cfg.model.lora != run.config().model.lora:
        raise ValueError(
            "changes must not set model.lora: the weights before the step belong to other adapters, or to none. Also "
            "set model.path=FOLDER, a model to begin with."
        )
    known = {record["rollout_id"] for one in steps for record in run.records(one)}
    if unknown := sorted(set(drop_rollouts) - known):
        raise ValueError(f"drop_rollouts must be ids of these steps' rollouts, got {', '.join(unknown)}.")
    rewards = {one: _rewards(run.records(one), reward) for one in steps} if reward is not None else {}
    advantages: dict[int, Advantages] = {}
    if rewards or drop_rollouts or cfg.normalization != run.config().normalization:
        for one in steps:
            left = [record for record in run.records(one) if record["rollout_id"] not in drop_rollouts]
            advantages[one] = advantages_of(left, cfg.normalization, rewards.get(one))
    arguments = (run.path, steps, list(changes), advantages)
    result = compute_on_ranks(cfg.train.num_ranks, _compute, *arguments, on_step=on_step)
    for changed in result.steps:
        changed.rewards = rewards.get(changed.step, {})
        now = advantages.get(changed.step, {})
        changed.left_out = [name for name in now if _sign(now[name]) and name not in changed.advantages]
    return result


def _rewards(records: Sequence[Record], reward: str) -> dict[str, float]:
    pairs = zip(records, score_again(own_rubric(reward), records), strict=True)
    return {record["rollout_id"]: score.reward for record, score in pairs if score.is_scored}


def _compute(
    path: Path,
    steps: Sequence[int],
    changes: Sequence[str],
    advantages: Mapping[int, Advantages],
    on_step: OnStep,
) -> WhatIf:
    """Compute both sides; `advantages`, if given for a step, replace those of the batch."""
    run = RecordedRun(path)
    result = WhatIf([ChangedStep(step) for step in steps])

    def edit(step: int, batch: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in batch.unbind(0):
            rollout_id = plain(row["rollout", "rollout_id"])
            given = row["advantage"]
            before = float(given.mean())
            after = advantages[step].get(rollout_id, 0.0) if step in advantages else before
            result.steps[step - steps[0]].advantages[rollout_id] = (before, after)
            if step not in advantages:
                rows.append(row)
            elif rollout_id in advantages[step]:
                row["advantage"] = torch.full_like(given, after)
                rows.append(row)
        return stack_rows(rows)

    cfg = run.config(changes)
    is_other_model = cfg.model.path != run.config().model.path
    start = run.start_of(steps[0])
    real = ReplayLoop(
        run, run.config(), steps, start=start, keep_before=True, keep_gradients=True, on_step=on_step
    ).play()
    real_update = _update(real, real.before)
    real.after = {}  # free the model
    changed = ReplayLoop(
        run,
        cfg,
        steps,
        start=None if is_other_model else real.before,
        is_own_start=is_other_model,
        edit=edit,
        keep_before=is_other_model,
        keep_gradients=True,
        on_step=on_step,
    ).play()
    for step, before, after in zip(result.steps, real.steps, changed.steps, strict=True):
        names = [name for name in before.metrics | after.metrics if not is_performance(name)]
        step.metrics = {name: (before.metrics.get(name), after.metrics.get(name)) for name in names}
    result.gradient_cosine, _ = _compared(real.gradients, changed.gradients)
    result.update_cosine, result.update_ratio = _compared(real_update, _update(changed, changed.before or real.before))
    return result


def _update(computed: Computed, before: StateDict | None) -> list[torch.Tensor]:
    """Return the change of each trained parameter since the state `before`."""
    assert before is not None
    model = cast(torch.nn.Module, computed.after["model"])
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    weights = model.state_dict()
    return [weights[name].float() - before["tracked"]["model"][name].float() for name in trained]


def _compared(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[float | None, float | None]:
    """Return the cosine of two vectors, given in parts, and the ratio of lengths, or None."""
    if [one.shape for one in ours] != [one.shape for one in others]:
        return None, None
    dot = _sum((a.double() * b.double()).sum() for a, b in zip(ours, others, strict=True))
    first, second = (math.sqrt(_sum(one.double().square().sum() for one in side)) for side in (ours, others))
    if not first or not second:
        return None, None
    return dot / (first * second), second / first


def _sum(numbers: Iterable[torch.Tensor]) -> float:
    return math.fsum(float(whole(number)) for number in numbers)


def _sign(advantage: float) -> int:
    # The advantage of a reward at the mean of its group is zero up to rounding, which depends on the order.
    return (advantage > _NEAR_ZERO) - (advantage < -_NEAR_ZERO)
