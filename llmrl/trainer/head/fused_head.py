"""Log-probs with liger-kernel's fused output head, for GPUs."""

from __future__ import annotations

import torch

from llmrl._utils.imports import require
from llmrl.trainer.head.log_probs import LogitTransform


def check_fused_head(transform: LogitTransform) -> None:
    """Raise ImportError if liger-kernel is not installed, and ValueError if logits have a soft cap."""
    require("liger_kernel", extra="gpu")
    if transform.soft_cap is not None:
        raise ValueError("head_kernel='liger' is for models without a soft cap on logits; use head_kernel='torch'.")


def fused_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor,
    bias: torch.Tensor | None = None,
    transform: LogitTransform,
) -> torch.Tensor:
    """Return the log-prob of each target with liger-kernel's Triton kernel; arguments are those of `chunked_log_probs`.

    A position that scores several targets is computed once per target.
    """
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    device_type = hidden.device.type
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    scale = transform.scale / transform.temperature
    if bias is not None and scale != 1.0:
        bias = bias * scale
    outputs = LigerFusedLinearCrossEntropyFunction.apply(
        (hidden[positions] * scale).to(dtype),
        weight.to(dtype),
        targets,
        None if bias is None else bias.to(dtype),
        None,  # weights of classes
        -100,  # the id to ignore
        0.0,  # z-loss
        0.0,  # label smoothing
        "none",
        None,  # soft cap
        False,
        torch.float32,  # of sums over chunks
    )
    return -outputs[0].float()
