"""What losses return."""

from __future__ import annotations

import torch
from tensordict import TensorClass


class LLMLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Loss terms (`loss_*`, to be summed) and measurements (detached).

    All measurements are means over trained tokens only, each token counted once, so they do not shrink when prompts
    or padding grow.
    """

    loss_objective: torch.Tensor
    """[] the policy's loss, aggregated; `[num_trained_tokens]` with aggregation `none`."""
    clip_fraction: torch.Tensor
    """[] share of tokens whose ratio lies outside the clip bounds."""
    kl_approx: torch.Tensor
    """[] mean of `log pi_old - log pi`."""
    ESS: torch.Tensor
    """[] effective sample size divided by the number of tokens: 1 when all ratios are equal."""
    log_prob_difference_mean: torch.Tensor
    """[] mean of `|log pi - log pi_sampler|`: on-policy, what differs between trainer and engine."""
    log_prob_difference_max: torch.Tensor
    """[] the largest of them."""
    entropy: torch.Tensor | None = None
    loss_entropy: torch.Tensor | None = None
    loss_kl_to_ref: torch.Tensor | None = None
    kl_to_ref: torch.Tensor | None = None
    loss_kl_to_inference: torch.Tensor | None = None
    kl_to_inference: torch.Tensor | None = None

    def total_loss(self) -> torch.Tensor:
        """The sum of the loss terms: what to call `backward` on."""
        terms = (self.loss_objective, self.loss_entropy, self.loss_kl_to_ref, self.loss_kl_to_inference)
        return torch.stack([term.sum() for term in terms if term is not None]).sum()

    def measurements(self) -> dict[str, float]:
        """Everything as Python numbers, by name; loss terms summed."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: float(value.detach().sum()) for name, value in named.items() if value is not None}


class GRPOLossOutput(LLMLossOutput):
    """Output of `GRPOLoss`."""


class DAPOLossOutput(LLMLossOutput):
    """Output of `DAPO`."""


class CISPOLossOutput(LLMLossOutput):
    """Output of `CISPOLoss`."""
