"""Relatives of GRPO that differ from it by a ratio, an average or a missing clip."""

from __future__ import annotations

from typing import Any, get_args

import torch
from tensordict.nn import TensorDictModuleBase

from llmrl.objectives.losses.aggregation import Aggregation
from llmrl.objectives.losses.clipping import BinaryDivergence, is_within_trust_region
from llmrl.objectives.losses.grpo import GRPOLoss
from llmrl.objectives.ratios import bounded_exp


class DrGRPOLoss(GRPOLoss):
    """GRPO without its length bias: token losses over a fixed length (Dr. GRPO, arXiv:2503.20783, section 3.2).

    The other half of the method is an advantage without the division by the standard deviation:
    `MCAdvantage(normalization="mean")`.

    Args:
        actor_network: see `GRPOLoss`.
        fixed_length: the generation budget, that every sequence is divided by.
        arguments: the other keywords of `GRPOLoss`.
    """

    def __init__(
        self, actor_network: TensorDictModuleBase | None = None, *, fixed_length: int, **arguments: Any
    ) -> None:
        super().__init__(actor_network, aggregation="fixed_length", fixed_length=fixed_length, **arguments)


class DPPOLoss(GRPOLoss):
    """The policy gradient within a trust region of divergence, not of ratio (DPPO, arXiv:2602.04879).

    A token's loss is `-r A`, or 0 where its update would leave the region (`is_within_trust_region`); `clip_fraction`
    is the share of those. As in the paper the region lies around the policy that sampled, and the ratio is to it,
    whether old log-probs are written or not. With `importance_cap` the ratio is to the trainer's own log-probs before
    the update, times their bounded weight; the region stays where it is.

    Args:
        actor_network: see `GRPOLoss`.
        max_divergence: bound of the divergence at a token.
        divergence: `tv`, of "this token or another", or `kl`.
        arguments: the other keywords of `GRPOLoss`, but those of its clip.

    Raises:
        TypeError: if `clip_epsilon` or `dual_clip` is given.
        ValueError: if the bound is not positive, or the divergence unknown.
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
                raise TypeError(f"DPPOLoss has no argument {name!r}: max_divergence bounds an update.")
        if not max_divergence > 0:
            raise ValueError(f"max_divergence must be positive, got {max_divergence}.")
        if divergence not in get_args(BinaryDivergence):
            raise ValueError(f"divergence must be one of {list(get_args(BinaryDivergence))}, got {divergence!r}.")
        super().__init__(actor_network, clip_epsilon=(1.0, float("inf")), **arguments)
        self.max_divergence = max_divergence
        self.divergence: BinaryDivergence = divergence

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return what each trained token costs, `[num_tokens]`."""
        return -bounded_exp(log_ratio) * advantage

    def _is_clipped(
        self, log_ratio: torch.Tensor, log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, advantage: torch.Tensor
    ) -> torch.Tensor:
        return ~is_within_trust_region(log_probs, sampler_log_probs, advantage, self.max_divergence, self.divergence)


class GSPOLoss(GRPOLoss):
    """Length-normalized sequence ratios, clipped as one (GSPO, arXiv:2507.18071, equations 5, 7 and 14).

    The default bounds are the paper's (section 5.1), far smaller than those of token ratios. A sequence is a row: of a
    rollout that was forked into rows, each has its own ratio.
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
    """The plain policy gradient, `-A log pi` summed over a sequence (RLOO, arXiv:2402.14740, equations 5 and 7).

    Its baseline is `MCAdvantage(normalization="leave_one_out")`. There is no ratio and no clip; where the sampler is
    not the policy, `importance_cap` bounds the weight that corrects for it.
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
        """Return what each trained token costs, `[num_tokens]`."""
        return -advantage * log_probs
