"""Relatives of GRPO that differ from it by a ratio, an average or a missing clip."""

from __future__ import annotations

from typing import Any

import torch
from tensordict.nn import TensorDictModuleBase

from llmrl.objectives.aggregation import Aggregation
from llmrl.objectives.grpo import GRPOLoss


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


class GSPOLoss(GRPOLoss):
    """Length-normalized sequence ratios, clipped as one (GSPO, arXiv:2507.18071, equations 5, 7 and 14).

    The default bounds are the paper's (section 5.1), far smaller than those of token ratios. A sequence is a row: of a
    rollout that was forked into rows, each has its own ratio.
    """

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = (3e-4, 4e-4),
        aggregation: Aggregation = "sequence_mean",
        **arguments: Any,
    ) -> None:
        super().__init__(
            actor_network, clip_epsilon=clip_epsilon, aggregation=aggregation, ratio="sequence", **arguments
        )


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
        for name in ("clip_epsilon", "dual_clip", "ratio"):
            if name in arguments:
                raise TypeError(f"RLOOLoss has no argument {name!r}: it has no ratio to clip; use importance_cap.")
        super().__init__(actor_network, aggregation=aggregation, clip_epsilon=(1.0, float("inf")), **arguments)

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return what each trained token costs, `[num_tokens]`."""
        return -advantage * log_probs
