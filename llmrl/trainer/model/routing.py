"""Metrics of the routing of tokens in a mixture of experts."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from llmrl._utils.ranks import gathered
from llmrl.engines.transformers.expert_routers import Choices


@dataclass(slots=True)
class RoutingCounts:
    """Counts of routed tokens, summed over micro-batches."""

    loads: torch.Tensor
    """[num_layers, num_experts] float64: tokens computed by each expert."""
    num_told: int = 0
    """Number of (token, layer) pairs with experts given by the engine."""
    num_different: int = 0
    """Number of these pairs for which the trainer's own router chose other experts."""

    @classmethod
    def of(
        cls, choices: Choices, num_experts: int, positions: torch.Tensor, routed_experts: torch.Tensor | None
    ) -> RoutingCounts:
        """Count the tokens at `positions`; `routed_experts` are the engine's, `[num_positions, num_layers, top_k]`."""
        loads = torch.stack([torch.bincount(used[positions].flatten(), minlength=num_experts) for _, used in choices])
        counts = cls(loads.double().cpu())
        if routed_experts is not None:
            is_told = (routed_experts[positions] >= 0).all(-1)
            differs = [(o[positions].sort(-1)[0] != u[positions].sort(-1)[0]).any(-1) for o, u in choices]
            counts.num_told = int(is_told.sum())
            counts.num_different = int((torch.stack(differs, 1) & is_told).sum())
        return counts

    def __add__(self, other: RoutingCounts) -> RoutingCounts:
        num_told = self.num_told + other.num_told
        num_different = self.num_different + other.num_different
        return RoutingCounts(self.loads + other.loads, num_told, num_different)

    def summed(self, process_group: torch.distributed.ProcessGroup | None) -> RoutingCounts:
        """Return the counts summed over all ranks."""
        return functools.reduce(RoutingCounts.__add__, gathered(self, process_group))

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics by name.

        Example:
            >>> RoutingCounts(torch.tensor([[3.0, 1.0], [2.0, 2.0]])).to_metrics()["router_load_max"]
            1.5
        """
        num_experts = self.loads.shape[1]
        shares = self.loads / self.loads.sum(1, keepdim=True)
        entropies = torch.special.entr(shares).sum(1) / math.log(num_experts)
        metrics = {"router_load_max": float(shares.max()) * num_experts, "router_entropy": float(entropies.mean())}
        if self.num_told:
            metrics["router_difference"] = self.num_different / self.num_told
        return metrics
