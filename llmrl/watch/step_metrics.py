"""Metrics of the updates of one step."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor

from llmrl.data.ragged import has_entry
from llmrl.engines.load import take_load
from llmrl.trainer import TrainStepReport

Learned = TrainStepReport | Sequence[TrainStepReport] | Mapping[str, float]
"""Result of a step: the report of its update, the reports of several updates, or metrics."""

_NUM_TENSORS = 32
_NUM_WEIGHTS = 1024
"""Size of the sample for measuring the change of the weights."""
_OLD_LOG_PROBS = ("old_log_probs", "full")


def metrics_of(learned: Learned) -> dict[str, float]:
    """Return the metrics of a step's updates: counts are added, and other metrics are averaged.

    `is_skipped` is 1 only if all updates were skipped. Metrics that compare trainer and engine come
    from the first update, because later updates are off-policy.

    Example:
        >>> metrics = metrics_of([TrainStepReport(loss=1.0, num_rows=2), TrainStepReport(loss=2.0, num_rows=3)])
        >>> metrics["loss"], metrics["num_rows"], metrics["is_skipped"], metrics["num_skipped"]
        (1.5, 5.0, 0.0, 0.0)
    """
    if isinstance(learned, Mapping):
        return dict(learned)
    if isinstance(learned, TrainStepReport):
        learned = [learned]
    rows = [report.to_metrics() for report in learned]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if name in row]
        if name.startswith("num_"):
            merged[name] = sum(values)
        elif name == "is_skipped":
            merged[name] = min(values)
        elif name == "ESS" or name.startswith(("log_prob_difference", "on_policy")):
            merged[name] = values[0]
        else:
            merged[name] = sum(values) / len(values)
    return merged or {"is_skipped": 1.0}


def only_finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with finite values.

    Example:
        >>> only_finite({"loss": float("nan"), "num_rows": 3})
        {'num_rows': 3.0}
    """
    return {name: float(value) for name, value in metrics.items() if math.isfinite(value)}


class StepMeter:
    """Measures one step from construction: times, learning rate, weight change, memory, engine load.

    Args:
        tracked: objects of the loop; objects with `param_groups` are optimizers.
        engine: engine of the load metrics, which cover the time since the previous step.
    """

    def __init__(self, tracked: Mapping[str, Any], engine: object = None) -> None:
        self._engine = engine
        # Read now, because the schedule advances before the step is logged.
        self._rates = [float(group["lr"]) for one in tracked.values() for group in getattr(one, "param_groups", ())]
        self._weights = _sample_of_weights(tracked)
        self._parts: dict[str, float] = {}
        self._begun = time.perf_counter()
        for device in _devices():
            torch.cuda.reset_peak_memory_stats(device)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a part of the step as the metric `NAME_seconds`; the rest is `train_seconds`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.perf_counter() - started

    def metrics(self, of_step: Mapping[str, float]) -> dict[str, float]:
        """Return the measurements so far, given the step's other metrics."""
        seconds = time.perf_counter() - self._begun
        measured = {f"{name}_seconds": part for name, part in self._parts.items()}
        measured["train_seconds"] = seconds - sum(measured.values())
        measured["seconds"] = of_step.get("generate_seconds", 0.0) + seconds
        if "num_trained_tokens" in of_step:
            measured["trained_tokens_per_second"] = of_step["num_trained_tokens"] / measured["seconds"]
        if self._rates:
            measured["learning_rate"] = max(self._rates)
        if self._weights:
            measured["weight_change"] = _change_of(self._weights)
        measured["peak_memory_gib"] = _peak_memory() / 2**30
        if (load := take_load(self._engine)) is not None:
            measured |= load.to_metrics()
        return measured


def _sample_of_weights(tracked: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a sample of this rank's trained weights, each as a view and a copy."""
    modules = [one for one in tracked.values() if isinstance(one, torch.nn.Module)]
    trained = [one.detach() for module in modules for one in module.parameters() if one.requires_grad and one.ndim > 1]
    sample = []
    for parameter in trained[:: math.ceil(len(trained) / _NUM_TENSORS) or 1]:
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local()
        if parameter.is_contiguous():
            weights = parameter.view(-1)[:_NUM_WEIGHTS]
            sample.append((weights, weights.clone()))
    return sample


def _change_of(sample: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Return the relative change of a sample of weights, which is not empty."""
    changes = [(now.float() - before.float()).norm().cpu() for now, before in sample]
    sizes = [before.float().norm().cpu() for _, before in sample]
    size = float(torch.stack(sizes).norm())
    return float(torch.stack(changes).norm()) / size if size else 0.0


def _devices() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def _peak_memory() -> int:
    """Return peak memory in bytes: of the fullest GPU in this step, or of this process so far if there is no GPU."""
    if devices := _devices():
        return max(map(torch.cuda.max_memory_allocated, devices))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def is_logged(logged: Mapping[int, Mapping[str, float]], step: int, split: str) -> bool:
    """Return whether a step's metrics of a split were logged before a kill, and so all of its rollouts."""
    names = logged.get(step, {})
    if split.startswith("eval/"):
        return any(name.startswith(f"{split}/") for name in names)
    return split != "train" or "policy_version" in names


def log_probs_before(learned: Learned, batch: TensorDictBase) -> list[torch.Tensor] | None:
    """Return the trainer's log-probs before a step's updates, `[num_tokens]` per row, or None if unknown."""
    if has_entry(batch, _OLD_LOG_PROBS):
        return [row[_OLD_LOG_PROBS] for row in batch.unbind(0)]
    if isinstance(learned, TrainStepReport):
        learned = [learned]
    if isinstance(learned, Mapping) or len(learned) != 1:
        return None
    return learned[0].log_probs or None
