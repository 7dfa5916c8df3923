"""One optimizer step on one batch."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import torch
from tensordict import TensorDictBase
from torch.distributed.tensor import DTensor

from llmrl._utils.ranks import rank_and_size
from llmrl.objectives.losses.base import LLMLoss, MicroLoss
from llmrl.objectives.losses.inputs import LossInputs, NonFiniteColumnError
from llmrl.trainer.on_policy import check_difference
from llmrl.trainer.trained_model import trained_model


@dataclass(slots=True)
class TrainStepReport:
    """What a training step did."""

    is_skipped: bool = False
    """True when the optimizer was not stepped."""
    skip_reason: str = ""
    loss: float = math.nan
    """Sum of the loss terms over the whole batch."""
    grad_norm: float = math.nan
    """Before clipping."""
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_row_tokens: int = 0
    """Tokens of all rows, prompts included."""
    num_micro_batches: int = 0
    seconds: float = 0.0
    measurements: dict[str, float] = field(default_factory=dict)
    """The loss's own: loss terms, ESS, clip fraction, log-prob differences, ..."""
    log_probs: list[torch.Tensor] = field(default_factory=list, repr=False)
    """The policy's before the update, `[num_tokens]` per row of the batch, NaN where nothing is trained, and
    everywhere after a loss of whole distributions, which makes none (`DistillationLoss(teacher=)`)."""

    def to_metrics(self) -> dict[str, float]:
        """Return all numbers, flat; those that are not finite, such as the loss of a skipped step, are left out."""
        left_out = ("skip_reason", "measurements", "log_probs")
        named = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in left_out}
        named["num_skipped"] = int(self.is_skipped)
        return {name: float(value) for name, value in (named | self.measurements).items() if math.isfinite(value)}


def train_step(
    loss_module: LLMLoss,
    batch: TensorDictBase,
    optimizer: torch.optim.Optimizer,
    *,
    token_budget: int | None = None,
    max_grad_norm: float | None = 1.0,
) -> TrainStepReport:
    """Do one update: micro-batches by token budget, gradients of the whole batch's loss, clipping, a step.

    A column of the batch, a loss or a gradient that is not finite skips the step; the report says so, and a warning.
    So does, without a warning, a batch in which nothing is trained, or every advantage is zero. A row of advantage zero
    is not computed, unless the loss has other terms; it counts in averages over the batch, and is in no measurement.
    Gradients are cleared before and after. Where the policy's log-probs differ from those that the same weights gave in
    the engine by more than rounding, a warning names the likely causes.

    Where the policy's model is sharded (`shard_model`) every rank calls this with the same batch. The micro-batches are
    dealt out, gradients are summed, and every rank has the report of the whole batch.

    Args:
        loss_module: its `actor_network` should be a `TransformersWrapper` for micro-batches.
        batch: training rows with advantages.
        token_budget: computed tokens in a micro-batch; default, the policy's.
        max_grad_norm: gradients are scaled down to this norm; None leaves them.

    Raises:
        ValueError: if the loss is left per token or per sequence, so that there is no scalar to train on, or
            `max_grad_norm` is not positive.
    """
    if not loss_module.is_scalar:
        raise ValueError("train_step needs one number; the loss has aggregation or reduction 'none'.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm must be a positive number, or None to leave gradients as they are, got {max_grad_norm}."
        )
    record = trained_model(getattr(loss_module.actor_network, "model", loss_module.actor_network))
    rank, num_ranks = rank_and_size(record.process_group)
    started = time.perf_counter()
    report = TrainStepReport(num_rows=batch.batch_size.numel())
    try:
        inputs = loss_module.prepare(batch) if report.num_rows else None
    except NonFiniteColumnError as error:
        # As a reason, not an error: a run that is resumed reads the same batch again.
        warnings.warn(f"The step is skipped. {error}", stacklevel=2)
        return _skipped(report, f"non_finite_{error.column}", started)
    if inputs is None or not inputs.num_scored:
        return _skipped(report, "no_trained_tokens", started)
    loss_module.leave_out_idle_rows(inputs)
    if not inputs.num_scored:
        return _skipped(report, "no_signal", started)
    report.num_trained_tokens = inputs.num_scored
    report.num_row_tokens = inputs.is_scored.shape[0]
    optimizer.zero_grad(set_to_none=True)
    record.routing = None  # of others' forward passes
    done: list[MicroLoss] = []
    for micro in loss_module.micro_losses(inputs, batch, token_budget=token_budget, rank=rank, num_ranks=num_ranks):
        micro.total().backward()
        if not micro.is_repeated:
            done.append(micro.detached())
    if record.process_group is not None:
        done = _gathered(done, record.process_group)
    report.num_micro_batches = len(done)
    output = loss_module.collect(done)
    report.loss = float(output.total_loss())
    report.measurements = output.measurements()
    if record.routing is not None:
        report.measurements |= record.routing.summed(record.process_group).to_metrics()
    report.log_probs = _rows_of([(micro.flat_index, micro.log_probs) for micro in done], inputs)
    if hasattr(loss_module.tensor_keys, "policy_version"):
        report.measurements |= check_difference(record, batch, report.log_probs, loss_module.tensor_keys)
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    report.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
        optimizer.zero_grad(set_to_none=True)
        name = "loss" if not math.isfinite(report.loss) else "gradient"
        warnings.warn(f"The step is skipped: the {name} of the batch is not finite.", stacklevel=2)
        return _skipped(report, f"non_finite_{name}", started)
    if max_grad_norm is not None and report.grad_norm > max_grad_norm:
        _scale_gradients(parameters, max_grad_norm / report.grad_norm)
    optimizer.step()
    record.num_updates += 1
    optimizer.zero_grad(set_to_none=True)
    report.seconds = time.perf_counter() - started
    return report


def _rows_of(parts: Iterable[tuple[torch.Tensor, torch.Tensor | None]], inputs: LossInputs) -> list[torch.Tensor]:
    """Return the values of trained tokens as one tensor per row."""
    column = torch.full((inputs.is_scored.shape[0],), torch.nan)
    for flat_index, values in parts:
        if values is not None:
            column[flat_index.cpu()] = values.float().cpu()
    return list(column.split([len(token_ids) for token_ids in inputs.token_ids]))


def _skipped(report: TrainStepReport, reason: str, started: float) -> TrainStepReport:
    report.is_skipped = True
    report.skip_reason = reason
    report.seconds = time.perf_counter() - started
    return report


def _gathered(micro_losses: list[MicroLoss], process_group: torch.distributed.ProcessGroup) -> list[MicroLoss]:
    """Return the micro-losses of all ranks."""
    held: list[list[MicroLoss]] = [[] for _ in range(torch.distributed.get_world_size(process_group))]
    torch.distributed.all_gather_object(held, [micro.to("cpu") for micro in micro_losses], group=process_group)
    return [micro for part in held for micro in part]


def _scale_gradients(parameters: Iterable[torch.nn.Parameter], factor: float) -> None:
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(factor)
