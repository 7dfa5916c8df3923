"""Long rows split over ranks: each computes a part of the tokens, and in attention all tokens for a part of the heads.

This is Ulysses (arXiv:2309.14509). Two ranks, a row of four tokens and two heads:

    layers          rank 0: tokens 0 1          rank 1: tokens 2 3
    attention       rank 0: head 0, 0 1 2 3     rank 1: head 1, 0 1 2 3

What comes after the decoder is computed by each rank for all tokens, so each rank counts its share of the loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """Ranks that compute the same rows together."""

    mesh: DeviceMesh
    """The ranks, in the order of their tokens."""

    @classmethod
    def of(cls, device_type: str, num_ranks: int, num_context_ranks: int) -> ContextRanks:
        """Divide all ranks into groups of neighbours; all ranks call this, and each gets its own group.

        Raises ValueError if the groups do not have the same size.
        """
        if num_context_ranks < 1 or num_ranks % num_context_ranks:
            raise ValueError(f"context_ranks={num_context_ranks} does not divide the {num_ranks} ranks of the model.")
        shape = (num_ranks // num_context_ranks, num_context_ranks)
        return cls(init_device_mesh(device_type, shape, mesh_dim_names=("data", "context"))["context"])

    @property
    def rank(self) -> int:
        """Index of this rank in its group."""
        return self.mesh.get_local_rank()

    @property
    def size(self) -> int:
        """Number of ranks of a group."""
        return self.mesh.size()

    def part_of(self, column: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return this rank's tokens of `[num_bins, length, ...]`, as many for each rank; the last are padded."""
        padding = (0, 0) * (column.ndim - 2) + (0, -column.shape[1] % self.size)
        return torch.nn.functional.pad(column, padding, value=fill).chunk(self.size, dim=1)[self.rank]

    def positions_of(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Return where this rank's flattened part has those of the flat positions that it contains."""
        part = -(-length // self.size)
        bin_index, place = positions // length, positions % length - self.rank * part
        is_own = (place >= 0) & (place < part)
        return (bin_index * part + place)[is_own]

    def whole(self, states: torch.Tensor, length: int) -> torch.Tensor:
        """Return the states of all tokens, `[num_bins, length, size]`, from each rank's; gradients are summed."""
        parts = DTensor.from_local(states, self.mesh, [Shard(1)], run_check=False)
        return parts.full_tensor(grad_placements=[Partial()])[:, :length]

    def by_heads(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """Turn `[num_bins, num_heads, part, head_size]` into `[num_bins, num_heads / size, length, head_size]`."""
        num_heads = tensor.shape[1]
        if num_heads % self.size:  # each head of keys is copied for the ranks that have its queries
            tensor = tensor.repeat_interleave(self.size // math.gcd(num_heads, self.size), dim=1)
        parts = self._exchanged(tensor.unflatten(1, (self.size, -1)).movedim(1, 0))
        return parts.movedim(0, 2).flatten(2, 3)[:, :, :length]

    def by_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Turn `[num_bins, length, num_heads / size, head_size]` into `[num_bins, part, num_heads, head_size]`."""
        padded = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, -output.shape[1] % self.size))
        heads = self._exchanged(padded.unflatten(1, (self.size, -1)).movedim(1, 0))
        return heads.movedim(0, 2).flatten(2, 3)

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give entry `i` to rank `i`, and return what the ranks gave this one, by rank."""
        return all_to_all_single_autograd(tensor.contiguous(), None, None, self.mesh.get_group())
