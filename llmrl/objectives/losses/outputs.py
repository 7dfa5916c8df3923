"""What losses return."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from tensordict import TensorClass


class LossOutput(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Loss terms (`loss_*`, to be summed) and measurements (detached).

    All measurements are means over trained tokens only, each token counted once, so they do not shrink when prompts
    or padding grow.
    """

    def total_loss(self) -> torch.Tensor:
        """Return the sum of the loss terms: what to call `backward` on."""
        terms = [value for name, value in self._set_fields().items() if name.startswith("loss_")]
        return torch.stack([term.sum() for term in terms]).sum()

    def measurements(self) -> dict[str, float]:
        """Return all terms and measurements as Python numbers, by name; loss terms summed."""
        return {name: float(value.detach().sum()) for name, value in self._set_fields().items()}

    def _set_fields(self) -> dict[str, torch.Tensor]:
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in named.items() if value is not None}


def summarized(measured: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return means of measurements over trained tokens, sums of those that are counts (`num_...`)."""
    return {name: column.sum() if name.startswith("num_") else column.mean() for name, column in measured.items()}


class LLMLossOutput(LossOutput):
    """Output of the losses of the GRPO family."""

    loss_objective: torch.Tensor
    """[] the policy's loss, aggregated; `[num_trained_tokens]` with aggregation `none`."""
    ratio: torch.Tensor
    """[] mean of `pi / pi_old`: 1 where the old log-probs are the trainer's own, at the first update on a batch."""
    clip_fraction: torch.Tensor
    """[] share of tokens with a ratio outside the clip bounds."""
    kl_approx: torch.Tensor
    """[] mean of `log pi_old - log pi`."""
    ESS: torch.Tensor
    """[] effective sample size of the weights that tokens have, ratio times importance weight before they are bounded,
    divided by the number of tokens: 1 when all are equal."""
    log_prob_difference_mean: torch.Tensor
    """[] mean of `|log pi - log pi_sampler|` with the trainer's own old log-probs where the batch has them: on-policy,
    what differs between trainer and engine, updates left out."""
    log_prob_difference_max: torch.Tensor
    """[] the largest of them."""
    num_clamped_tokens: torch.Tensor
    """[] tokens with a log-ratio beyond `MAX_LOG_RATIO`, which is clamped before its exponential."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None where the policy does not give it."""
    loss_entropy: torch.Tensor | None = None
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    loss_kl_to_inference: torch.Tensor | None = None
    kl_to_inference: torch.Tensor | None = None
    importance_weight: torch.Tensor | None = None
    """[] mean weight of old policy to sampler, as bounded."""
    importance_clip_fraction: torch.Tensor | None = None
    """[] share of tokens with a weight that the bounds changed."""
    staleness: torch.Tensor | None = None
    """[] mean number of versions between the policy and what sampled."""
    masked_fraction: torch.Tensor | None = None
    """[] share of tokens left out of the objective."""


class GRPOLossOutput(LLMLossOutput):
    """Output of `GRPOLoss`."""


class DAPOLossOutput(LLMLossOutput):
    """Output of `DAPO`."""


class CISPOLossOutput(LLMLossOutput):
    """Output of `CISPOLoss`."""


class SFTLossOutput(LossOutput):
    """Output of `SFTLoss`."""

    loss_sft: torch.Tensor
    """[] the loss, or `[num_sequences]` with reduction `none`."""
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    """[] mean over trained tokens."""
    num_clamped_tokens: torch.Tensor | None = None
    """[] tokens of which the KL's log-ratio is beyond `MAX_LOG_RATIO`; None without a reference."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None where the policy does not give it."""


class DistillationLossOutput(LossOutput):
    """Output of `DistillationLoss`."""

    loss_distill: torch.Tensor
    """[] the loss, or `[num_sequences]` with reduction `none`."""
    kl_to_teacher: torch.Tensor
    """[] mean over trained tokens."""
    num_clamped_tokens: torch.Tensor | None = None
    """[] tokens of which the log-ratio is beyond `MAX_LOG_RATIO`; None where nothing is estimated."""
    entropy: torch.Tensor | None = None
    """[] mean, in nats; None where the policy does not give it."""
