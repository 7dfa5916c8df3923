"""What the updates of one step say, as one row of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase

from llmrl.data.ragged import has_entry
from llmrl.trainer import TrainStepReport

Learned = TrainStepReport | Sequence[TrainStepReport] | Mapping[str, float]
"""Of a step: the report of its update, those of its updates, or metrics."""

_OLD_LOG_PROBS = ("old_log_probs", "full")


def metrics_of(learned: Learned) -> dict[str, float]:
    """One row of metrics: of several updates counts are added, `is_skipped` is whether all were, others are means.

    What compares trainer and engine is of the first update: the later ones have moved away from what was sampled.

    Example:
        >>> metrics = metrics_of([TrainStepReport(loss=1.0, num_rows=2), TrainStepReport(loss=2.0, num_rows=3)])
        >>> metrics["loss"], metrics["num_rows"], metrics["is_skipped"]
        (1.5, 5.0, 0.0)
    """
    if isinstance(learned, Mapping):
        return dict(learned)
    reports = [learned] if isinstance(learned, TrainStepReport) else list(learned)
    rows = [report.to_metrics() for report in reports]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name.startswith("num_"):
            merged[name] = sum(values)
        elif name == "is_skipped":
            merged[name] = min(values)
        elif name == "ESS" or name.startswith("log_prob_difference"):
            merged[name] = values[0]
        else:
            merged[name] = sum(values) / len(values)
    return merged or {"is_skipped": 1.0}


def is_logged(logged: Mapping[int, Mapping[str, float]], step: int, split: str) -> bool:
    """Whether a step's metrics of a split were logged, by step, before a kill; they come after its rollouts.

    Example:
        >>> is_logged({1: {"policy_version": 1.0}}, 1, "train"), is_logged({}, 1, "eval/sums")
        (True, False)
    """
    names = logged.get(step, {})
    if split.startswith("eval/"):
        return any(name.startswith(f"{split}/") for name in names)
    return split != "train" or "policy_version" in names


def log_probs_before(learned: Learned, batch: TensorDictBase) -> list[torch.Tensor] | None:
    """The trainer's log-probs before a step's updates, `[num_tokens]` a row of the batch; None where unknown."""
    if has_entry(batch, _OLD_LOG_PROBS):
        return [row[_OLD_LOG_PROBS] for row in batch.unbind(0)]
    reports = [learned] if isinstance(learned, TrainStepReport) else learned
    if isinstance(reports, Mapping) or len(reports) != 1:
        return None
    return reports[0].log_probs or None
