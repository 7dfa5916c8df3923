"""Attention masks of packed rows, as tensors or as block masks."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.nn.attention.flex_attention import BlockMask

from llmrl.trainer.packing.packed_rows import PackedRows

IMPLEMENTATION = "llmrl_packed"
"""Name of `packed_attention` in transformers."""
FUSED_DEVICES = frozenset({"cuda"})
"""Device types with kernels that train without `[length, length]` masks and weights."""
MAX_PRODUCT_LENGTH = 256
"""Length up to which attention of a bin is computed by matrix products on CPU; longer bins use `sdpa`."""
_BLOCK_LENGTH = 128


class PackedMask(BlockMask):
    """Block mask of packed rows, `[1, 1, num_tokens, num_tokens]` over all bins, which is never materialised."""

    ndim = 4
    bounds: torch.Tensor | None
    """See `PackedRows.sequence_bounds`."""
    longest: int
    """See `PackedRows.longest_sequence`."""
    window: int | None
    """Attention window in tokens of a row, including the token itself; None is unlimited."""


Mask: TypeAlias = torch.Tensor | PackedMask
"""Mask in the form that the attention implementation takes."""


def packed_mask(packed: PackedRows, *, implementation: str, dtype: torch.dtype, window: int | None = None) -> Mask:
    """Return the mask of packed rows in the form that an attention implementation takes.

    It is a `PackedMask` for `IMPLEMENTATION` on `FUSED_DEVICES`, else `[num_bins, 1, length, length]`: bool, or
    `dtype` if it is added to scores. For `window` see `PackedRows.attention_mask`.
    """
    length = packed.input_ids.shape[1]
    device_type = packed.input_ids.device.type
    if implementation == IMPLEMENTATION and device_type in FUSED_DEVICES:
        return _blocks_mask(packed, window)
    mask = packed.attention_mask(window=window)
    is_product = implementation == IMPLEMENTATION and device_type == "cpu" and length <= MAX_PRODUCT_LENGTH
    if implementation != "eager" and not is_product:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _blocks_mask(packed: PackedRows, window: int | None) -> PackedMask:
    num_bins, length = packed.input_ids.shape
    bin_starts = torch.arange(0, num_bins * length, length, device=packed.input_ids.device)
    # Copies rather than views, because the compiled kernel also depends on the bases of views.
    end = (packed.subtree_end + bin_starts[:, None]).flatten().clone()
    depth = packed.position_ids.flatten().clone()

    def is_seen(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (query >= key) & (query < end[key])
        return seen if window is None else seen & (depth[query] - depth[key] < window)

    partial, full = _seen_blocks(end, depth, window)
    mask = PackedMask.from_kv_blocks(
        *_listed(partial), *_listed(full), BLOCK_SIZE=_BLOCK_LENGTH, mask_mod=is_seen, seq_lengths=(len(end), len(end))
    )
    mask.bounds = packed.sequence_bounds
    mask.longest = packed.longest_sequence
    mask.window = window
    return mask


def _seen_blocks(end: torch.Tensor, depth: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two bool masks of query and key blocks, `[num_blocks, num_blocks]`: partially and fully visible.

    A node is visible to later nodes up to its `end`. With a window the partial blocks are an upper bound.
    """
    num_blocks = -(-len(end) // _BLOCK_LENGTH)
    missing = num_blocks * _BLOCK_LENGTH - len(end)
    ends = torch.cat([end, end.new_zeros(missing)]).view(num_blocks, _BLOCK_LENGTH)
    depths = torch.cat([depth, depth[-1:].expand(missing)]).view(num_blocks, _BLOCK_LENGTH)
    block = torch.arange(num_blocks, device=end.device)
    first = block * _BLOCK_LENGTH
    last = (block + 1) * _BLOCK_LENGTH - 1
    is_earlier = block[:, None] > block
    seen = (block[:, None] == block) | (is_earlier & (ends.amax(1) > first[:, None]))
    full = is_earlier & (ends.amin(1) > last[:, None]) & (last < len(end))[:, None]
    if window is not None:
        seen &= depths.amin(1)[:, None] - depths.amax(1) < window
        full &= depths.amax(1)[:, None] - depths.amin(1) < window
    return seen & ~full, full


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks of each query block, and the indices of all blocks with these first."""
    indices = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None].contiguous()
