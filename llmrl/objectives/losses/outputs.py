"""Outputs of the losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorClass


class LossOutput(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Loss terms (`loss_*`, to be summed) and detached measurements over the trained tokens."""

    def total_loss(self) -> torch.Tensor:
        """Return the sum of the loss terms, to call `backward` on."""
        terms = [value for name, value in self._set_fields().items() if name.startswith("loss_")]
        return torch.stack([term.sum() for term in terms]).sum()

    def measurements(self) -> dict[str, float]:
        """Return all measurements and summed loss terms by name, as Python numbers."""
        return {name: float(value.detach().sum()) for name, value in self._set_fields().items()}

    def _set_fields(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in named.items() if value is not None}


def summarized(measured: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the means of measurements over trained tokens, and the sums of counts (`num_...`)."""
    return {name: column.sum() if name.startswith("num_") else column.mean() for name, column in measured.items()}


class LLMLossOutput(LossOutput):
    """Output of the losses of the GRPO family."""

    loss_objective: torch.Tensor
    """[] aggregated policy loss; `[num_trained_tokens]` with aggregation `none`."""
    ratio: torch.Tensor
    """[] mean of `pi / pi_old`; 1 at the first update on a batch if the old log-probs are the trainer's."""
    clip_fraction: torch.Tensor
    """[] fraction of tokens with a ratio outside the clip bounds, or for `DPPOLoss` outside the trust region."""
    kl_approx: torch.Tensor
    """[] mean of `log pi_old - log pi`."""
    ESS: torch.Tensor
    """[] effective sample size divided by the number of tokens, of ratio times importance weight before bounding."""
    log_prob_difference_mean: torch.Tensor
    """[] mean of `|log pi - log pi_sampler|`, where `log pi` is the trainer's old log-prob if the batch has it."""
    log_prob_difference_max: torch.Tensor
    """[] maximum of `|log pi - log pi_sampler|`."""
    num_clamped_tokens: torch.Tensor
    """[] number of tokens with a log-ratio beyond `MAX_LOG_RATIO`."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None if the policy does not provide it."""
    loss_entropy: torch.Tensor | None = None
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    loss_kl_to_inference: torch.Tensor | None = None
    kl_to_inference: torch.Tensor | None = None
    importance_weight: torch.Tensor | None = None
    """[] mean of the bounded weights of old policy to sampler."""
    importance_clip_fraction: torch.Tensor | None = None
    """[] fraction of tokens with weights that the bounds changed."""
    staleness: torch.Tensor | None = None
    """[] mean number of versions between the sampling policy and the current one."""
    masked_fraction: torch.Tensor | None = None
    """[] fraction of tokens excluded from the objective."""


class GRPOLossOutput(LLMLossOutput):
    """Output of `GRPOLoss`."""


class DAPOLossOutput(LLMLossOutput):
    """Output of `DAPO`."""


class CISPOLossOutput(LLMLossOutput):
    """Output of `CISPOLoss`."""


class SFTLossOutput(LossOutput):
    """Output of `SFTLoss`."""

    loss_sft: torch.Tensor
    """[] loss; `[num_sequences]` with reduction `none`."""
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    """[] mean over trained tokens."""
    num_clamped_tokens: torch.Tensor | None = None
    """[] number of tokens with a KL log-ratio beyond `MAX_LOG_RATIO`; None without a reference."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None if the policy does not provide it."""


class DistillationLossOutput(LossOutput):
    """Output of `DistillationLoss`."""

    loss_distill: torch.Tensor
    """[] loss; `[num_sequences]` with reduction `none`."""
    kl_to_teacher: torch.Tensor
    """[] mean over trained tokens."""
    num_clamped_tokens: torch.Tensor | None = None
    """[] number of tokens with a log-ratio beyond `MAX_LOG_RATIO`; None if the divergence is exact."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None if the policy does not provide it."""
