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

from llmrl._utils.ranks import gathered
from llmrl.objectives.losses.base import LLMLoss, MicroLoss
from llmrl.objectives.losses.inputs import LossInputs, NonFiniteColumnError
from llmrl.trainer.on_policy import check_difference, sampled_tokens
from llmrl.trainer.trained_model import trained_model


@dataclass(slots=True)
class TrainStepReport:
    """Results of a training step."""

    is_skipped: bool = False
    """Whether the optimizer step was skipped."""
    skip_reason: str = ""
    loss: float = math.nan
    """Sum of the loss terms over the batch."""
    grad_norm: float = math.nan
    """Gradient norm before clipping."""
    num_rows: int = 0
    num_trained_tokens: int = 0
    num_row_tokens: int = 0
    """Tokens of all rows, including prompts."""
    num_micro_batches: int = 0
    seconds: float = 0.0
    measurements: dict[str, float] = field(default_factory=dict)
    """Metrics of the step: loss terms, ESS, clip fraction, log-prob differences, routing, loss scale and others."""
    log_probs: list[torch.Tensor] = field(default_factory=list, repr=False)
    """The policy's log-probs before the update, `[num_tokens]` per row; NaN for tokens that are not trained, and
    for all tokens with `DistillationLoss(teacher=)`, which computes none."""

    def to_metrics(self) -> dict[str, float]:
        """Return all finite numbers as one flat dictionary."""
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
    """Do one update on a batch: gradients of micro-batches, clipping, an optimizer step.

    The step is skipped with a warning if a column of the batch, the loss or a gradient is not finite. It is skipped
    without a warning if no token is trained, if every advantage is zero and the loss has no other terms, or if a
    gradient overflows in float16; an overflow halves the scale of the loss. Rows with zero advantage are not computed
    unless the loss has other terms; they count in averages over the batch but in no measurement. A warning names likely
    causes if the policy's log-probs differ from the engine's with the same weights by more than rounding explains.

    If the policy's model is sharded (`shard_model`), every rank must pass the same batch; the ranks
    share the micro-batches, and each returns the report of the whole batch.

    Args:
        loss_module: loss; its `actor_network` should be a `TransformersWrapper` for micro-batches.
        optimizer: its gradients are cleared before and after the step.
        token_budget: number of computed tokens per micro-batch; by default the policy's `token_budget`.
        max_grad_norm: maximum gradient norm; None disables clipping.

    Raises ValueError if the loss is not a scalar (aggregation or reduction `none`), or `max_grad_norm` is not positive.
    """
    if not loss_module.is_scalar:
        raise ValueError("train_step needs a scalar loss, but the aggregation or reduction of the loss is 'none'.")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"max_grad_norm must be a positive number, or None to leave gradients as they are, got {max_grad_norm}."
        )
    record = trained_model(getattr(loss_module.actor_network, "model", loss_module.actor_network))
    rank, num_ranks = record.place
    started = time.perf_counter()
    report = TrainStepReport(num_rows=batch.batch_size.numel())
    if not report.num_rows:
        return _skipped(report, "no_trained_tokens", started)
    try:
        inputs = loss_module.prepare(batch)
    except NonFiniteColumnError as error:
        # Not an error, which would end the run: a resumed run would read the same batch again.
        warnings.warn(f"The step is skipped. {error}", stacklevel=2)
        return _skipped(report, f"non_finite_{error.column}", started)
    if not inputs.num_scored:
        return _skipped(report, "no_trained_tokens", started)
    loss_module.leave_out_idle_rows(inputs)
    if not inputs.num_scored:
        return _skipped(report, "no_signal", started)
    report.num_trained_tokens = inputs.num_scored
    report.num_row_tokens = inputs.is_scored.shape[0]
    optimizer.zero_grad(set_to_none=True)
    record.routing = None  # discard counts of earlier forward passes
    done: list[MicroLoss] = []
    for micro in loss_module.micro_losses(inputs, batch, token_budget=token_budget, rank=rank, num_ranks=num_ranks):
        total = micro.total() / record.num_context_ranks
        (total if record.scaler is None else record.scaler.scale(total)).backward()
        if record.is_reporting and not micro.is_repeated:
            done.append(micro.detached())
    if record.process_group is not None:
        parts = gathered([micro.to("cpu") for micro in done], record.process_group)
        done = [micro for part in parts for micro in part]
    report.num_micro_batches = len(done)
    output = loss_module.collect(done)
    report.loss = float(output.total_loss())
    report.measurements = output.measurements()
    if record.routing is not None:
        report.measurements |= record.routing.summed(record.process_group).to_metrics()
    report.log_probs = _log_probs_of_rows(done, inputs)
    if (sampled := sampled_tokens(loss_module, batch, report.log_probs)) is not None:
        report.measurements |= check_difference(record, *sampled)
    if record.scaler is not None:
        report.measurements |= {"loss_scale": record.scaler.get_scale(), "num_overflows": 0.0}
        record.scaler.unscale_(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    report.grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    sizes = {"loss": report.loss, "gradient": report.grad_norm}
    name = next((name for name, size in sizes.items() if not math.isfinite(size)), None)
    if name is not None:
        optimizer.zero_grad(set_to_none=True)
        if record.scaler is not None:
            is_overflow = name == "gradient" and record.scaler.get_scale() > 1
            record.scaler.update()
            if is_overflow:
                report.measurements["num_overflows"] = 1.0
                return _skipped(report, "overflow", started)
        warnings.warn(f"The step is skipped: the {name} of the batch is not finite.", stacklevel=2)
        return _skipped(report, f"non_finite_{name}", started)
    if max_grad_norm is not None and report.grad_norm > max_grad_norm:
        for gradient in gradients:
            gradient.mul_(max_grad_norm / report.grad_norm)
    if record.scaler is None:
        optimizer.step()
    else:
        record.scaler.step(optimizer)
        record.scaler.update()
    record.num_updates += 1
    optimizer.zero_grad(set_to_none=True)
    report.seconds = time.perf_counter() - started
    return report


def _log_probs_of_rows(micro_losses: Iterable[MicroLoss], inputs: LossInputs) -> list[torch.Tensor]:
    column = torch.full((inputs.is_scored.shape[0],), torch.nan)
    for micro in micro_losses:
        if micro.log_probs is not None:
            column[micro.flat_index.cpu()] = micro.log_probs.float().cpu()
    return list(column.split([len(token_ids) for token_ids in inputs.token_ids]))


def _skipped(report: TrainStepReport, reason: str, started: float) -> TrainStepReport:
    report.is_skipped = True
    report.skip_reason = reason
    report.seconds = time.perf_counter() - started
    return report
