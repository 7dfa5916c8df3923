"""Splitting of long rows over ranks, as in Ulysses (arXiv:2309.14509).

Each rank computes a part of the tokens, and in attention all tokens for a part of the heads. With
two ranks, a row of four tokens and two heads:

    layers          rank 0: tokens 0 1          rank 1: tokens 2 3
    attention       rank 0: head 0, 0 1 2 3     rank 1: head 1, 0 1 2 3

After the decoder, each rank of a group computes all tokens of the row, so `train_step` divides each
loss by the size of the group.
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
    """Group of ranks that compute the same rows together."""

    mesh: DeviceMesh
    """Ranks of the group, in the order of their tokens."""

    @classmethod
    def of(cls, device_type: str, num_ranks: int, num_context_ranks: int) -> ContextRanks:
        """Divide all ranks into groups of neighbours and return this rank's group; every rank must call this."""
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
        """Return this rank's part of `[num_bins, length, ...]` along the length, padded at the end to equal parts."""
        padding = (0, 0) * (column.ndim - 2) + (0, -column.shape[1] % self.size)
        return torch.nn.functional.pad(column, padding, value=fill).chunk(self.size, dim=1)[self.rank]

    def positions_of(self, positions: torch.Tensor, length: int) -> torch.Tensor:
        """Return the flat positions that belong to this rank's part, as positions in the flattened part."""
        part = -(-length // self.size)
        bin_index, place = positions // length, positions % length - self.rank * part
        is_own = (place >= 0) & (place < part)
        return (bin_index * part + place)[is_own]

    def whole(self, states: torch.Tensor, length: int) -> torch.Tensor:
        """Gather the ranks' states into those of all tokens, `[num_bins, length, size]`; gradients are summed."""
        parts = DTensor.from_local(states, self.mesh, [Shard(1)], run_check=False)
        return parts.full_tensor(grad_placements=[Partial()])[:, :length]

    def by_heads(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        """Turn `[num_bins, num_heads, part, head_size]` into `[num_bins, num_heads / size, length, head_size]`."""
        num_heads = tensor.shape[1]
        if num_heads % self.size:  # repeat key heads, so that each rank has the keys of its queries
            tensor = tensor.repeat_interleave(self.size // math.gcd(num_heads, self.size), dim=1)
        parts = self._exchanged(tensor.unflatten(1, (self.size, -1)).movedim(1, 0))
        return parts.movedim(0, 2).flatten(2, 3)[:, :, :length]

    def by_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Turn `[num_bins, length, num_heads / size, head_size]` into `[num_bins, part, num_heads, head_size]`."""
        padded = torch.nn.functional.pad(output, (0, 0, 0, 0, 0, -output.shape[1] % self.size))
        heads = self._exchanged(padded.unflatten(1, (self.size, -1)).movedim(1, 0))
        return heads.movedim(0, 2).flatten(2, 3)

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send entry `i` to rank `i`, and return the received entries in the order of the ranks."""
        return all_to_all_single_autograd(tensor.contiguous(), None, None, self.mesh.get_group())
