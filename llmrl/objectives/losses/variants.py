"""Variants of GRPO with another ratio, aggregation or clipping."""

from __future__ import annotations

from typing import Any, get_args

import torch
from tensordict.nn import TensorDictModuleBase

from llmrl._utils.arguments import check_choice, check_positive
from llmrl.objectives.losses.aggregation import Aggregation
from llmrl.objectives.losses.clipping import BinaryDivergence, is_within_trust_region
from llmrl.objectives.losses.grpo import GRPOLoss
from llmrl.objectives.ratios import bounded_exp


class DrGRPOLoss(GRPOLoss):
    """GRPO with token losses divided by a fixed length (Dr. GRPO, arXiv:2503.20783, section 3.2).

    `fixed_length` is the generation budget; other keywords are those of `GRPOLoss`. The paper's
    advantage, without division by the standard deviation, is `MCAdvantage(normalization="mean")`.
    """

    def __init__(
        self, actor_network: TensorDictModuleBase | None = None, *, fixed_length: int, **arguments: Any
    ) -> None:
        super().__init__(actor_network, aggregation="fixed_length", fixed_length=fixed_length, **arguments)


class DPPOLoss(GRPOLoss):
    """Policy gradient within a trust region of divergence instead of ratio (DPPO, arXiv:2602.04879).

    A token's loss is `-r A`, or 0 if its update would leave the region (`is_within_trust_region`); `clip_fraction` is
    the fraction of such tokens. Region and ratio are relative to the sampler's policy, as in the
    paper, even if the batch has `old_log_prob`. With `importance_cap`, the region stays relative to
    the sampler, but the ratio is to the trainer's log-probs before the update and is multiplied by
    the bounded weight. Keywords are those of `GRPOLoss` except `clip_epsilon` and `dual_clip`.
    """

    _is_around_sampler = True

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        max_divergence: float = 0.15,
        divergence: BinaryDivergence = "tv",
        **arguments: Any,
    ) -> None:
        for name in ("clip_epsilon", "dual_clip"):
            if name in arguments:
                raise TypeError(f"DPPOLoss has no argument {name!r}: use max_divergence to bound an update.")
        check_positive(max_divergence=max_divergence)
        check_choice(get_args(BinaryDivergence), divergence=divergence)
        super().__init__(actor_network, clip_epsilon=(1.0, float("inf")), **arguments)
        self.max_divergence = max_divergence
        self.divergence: BinaryDivergence = divergence

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return the policy loss of each trained token, `[num_tokens]`."""
        return -bounded_exp(log_ratio) * advantage

    def _is_clipped(
        self, log_ratio: torch.Tensor, log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, advantage: torch.Tensor
    ) -> torch.Tensor:
        return ~is_within_trust_region(log_probs, sampler_log_probs, advantage, self.max_divergence, self.divergence)


class GSPOLoss(GRPOLoss):
    """GRPO with length-normalized sequence ratios (GSPO, arXiv:2507.18071, equations 5, 7 and 14).

    The default clip bounds are the paper's (section 5.1). A sequence is a row, so a rollout may have several ratios.
    """

    _has_sequence_ratio = True

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        aggregation: Aggregation = "sequence_mean",
        **arguments: Any,
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, **arguments)


class RLOOLoss(GRPOLoss):
    """Policy gradient without a ratio, `-A log pi` summed over a sequence (RLOO, arXiv:2402.14740, equations 5 and 7).

    The baseline is `MCAdvantage(normalization="leave_one_out")`. `importance_cap` corrects
    off-policy samples, but not a second update on a batch: use each batch once.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        aggregation: Aggregation = "sequence_sum",
        **arguments: Any,
    ) -> None:
        for name in ("clip_epsilon", "dual_clip"):
            if name in arguments:
                raise TypeError(f"RLOOLoss has no argument {name!r}: it has no ratio to clip; use importance_cap.")
        super().__init__(actor_network, aggregation=aggregation, clip_epsilon=(1.0, float("inf")), **arguments)

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return the policy loss of each trained token, `[num_tokens]`."""
        return -advantage * log_probs
