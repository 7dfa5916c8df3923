"""Pages of the viewer: changed steps, other rewards, and the same step of two runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from llmrl._utils.types import JSON
from llmrl.replay.bisect import Parting
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rescore import Rescored
from llmrl.replay.what_if import ChangedStep, WhatIf
from llmrl.viewer import read_run, write_page
from llmrl.viewer.run_data import Record, RunData


def write_what_if(run: RecordedRun, changed: WhatIf, path: str | Path) -> Path:
    """Write a page with the recorded steps and the changed steps as two runs.

    Rollouts with an advantage of another sign come first in each step. The columns of a rollout show both advantages.
    """
    steps = {step.step: step for step in changed.steps}
    real = _at_steps(read_run(run.path), steps)
    facts: dict[str, JSON] = {
        "gradient cosine": changed.gradient_cosine,
        "update cosine": changed.update_cosine,
        "update ratio": changed.update_ratio,
        "advantages of another sign": sum(len(step.turned) for step in changed.steps),
    }
    metrics = []
    for row in real.metrics:
        after = {name: value for name, (_, value) in steps[int(row["step"])].metrics.items() if value is not None}
        metrics.append(row | after)
    other = replace(
        real,
        name=f"{real.name}, changed",
        metrics=metrics,
        rollouts=[_changed(record, steps[record["step"]]) for record in real.rollouts],
        rows={
            key: [replace(row, advantage=_advantage(steps[key[0]], key[2])) for row in rows]
            for key, rows in real.rows.items()
        },
        health={},
        summary=facts,
        path="",
    )
    turned = {(step.step, name) for step in changed.steps for name in step.turned}
    for data in (real, other):
        data.rollouts.sort(key=lambda one: (one["step"], (one["step"], one["rollout_id"]) not in turned))
    return write_page([real, other], path)


def write_step(runs: Sequence[RecordedRun], parting: Parting, path: str | Path) -> Path:
    """Write a page with the first step that differs between runs, that rollout first."""
    sides = [_at_steps(read_run(run.path), [parting.step]) for run in runs]
    difference = f"{parting.quantity}, {parting.where}: {parting.first!s:.200} and {parting.second!s:.200}"
    sides[0] = replace(sides[0], summary={"first difference": difference})
    for data in sides:
        data.rollouts.sort(key=lambda one: one["rollout_id"] != parting.rollout_id)
    return write_page(sides, path)


def write_rescored(run: RecordedRun, result: Rescored, path: str | Path) -> Path:
    """Write a page with recorded and new rewards as two runs; large changes come first."""
    real = _at_steps(read_run(run.path), run.steps)
    facts: dict[str, JSON] = {
        "rank correlation": result.correlation,
        "pairs that change their order": result.swapped_share,
        "groups with a signal before": result.signal_share[0],
        "groups with a signal after": result.signal_share[1],
    }
    real.rollouts.sort(key=lambda one: -abs(one["reward"] - result.rewards.get(one["rollout_id"], one["reward"])))
    scored = [_with_reward(record, result.rewards) for record in real.rollouts]
    return write_page(
        [real, replace(real, name=f"{real.name}, rescored", rollouts=scored, summary=facts, path="")], path
    )


def _at_steps(data: RunData, steps: Collection[int]) -> RunData:
    """Return the data of a run, reduced to some steps of training."""
    return replace(
        data,
        metrics=[row for row in data.metrics if row["step"] in steps],
        rollouts=[record for record in data.rollouts if record["step"] in steps and record["split"] == "train"],
        rows={key: rows for key, rows in data.rows.items() if key[0] in steps and key[1] == "train"},
        health={step: line for step, line in data.health.items() if step in steps},
    )


def _changed(record: Record, step: ChangedStep) -> Record:
    name = record["rollout_id"]
    columns = dict(record.get("columns") or {})
    if name in step.advantages:
        before, after = step.advantages[name]
        columns["advantage"] = f"{before:.4g} → {after:.4g}"
    changed = cast(Record, {**record, "columns": columns})
    if not step.rewards:
        return changed
    return _with_reward(changed, step.rewards)


def _with_reward(record: Record, rewards: Mapping[str, float]) -> Record:
    name = record["rollout_id"]
    other = {"reward": rewards.get(name, 0.0), "is_scored": name in rewards, "reward_breakdown": {}}
    return cast(Record, {**record, **other})


def _advantage(step: ChangedStep, rollout_id: str) -> float:
    return step.advantages.get(rollout_id, (math.nan, math.nan))[1]
