"""The attention of packed rows: what computes it, and its masks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from llmrl.trainer.packing import PackedRows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Mask: TypeAlias = "torch.Tensor | BlockMask"
"""Which tokens each token sees, as the attention in use reads it."""

IMPLEMENTATION = "llmrl_packed"
MAX_PRODUCT_LENGTH = 256
"""Bins up to this length keep their attention weights for the backward pass on a CPU; longer ones take `sdpa`."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention as plain matrix products where `sdpa` is slower or cannot do it; anything else goes to `sdpa`.

    For bins of a few hundred tokens the backward pass of PyTorch's CPU kernel takes several times as long as the two
    products it is made of: an additive mask asks for those. Query heads that share a key head are one product, so keys
    are not repeated. A soft cap on the scores, which `sdpa` leaves out in silence, is always computed here.

    Args:
        query: `[num_bins, num_heads, length, head_size]`.
        key, value: `[num_bins, num_key_heads, length, head_size]`.
        attention_mask: `[num_bins, 1, length, length]`, either bool or 0 and very negative in the dtype of the
            computation; None is causal.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        s_aux, position_bias: sinks and additive biases; neither is known here together with a soft cap.

    Raises:
        TypeError: for attention sinks, and for a soft cap together with a position bias.
    """
    if s_aux is not None or (softcap is not None and position_bias is not None):
        raise TypeError("attention sinks, and biases under a soft cap, are computed by attn_implementation='eager'")
    is_additive = attention_mask is not None and attention_mask.is_floating_point() and position_bias is None
    if softcap is None and (dropout or not is_additive):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling,
            dropout=dropout,
            position_bias=position_bias,
            **arguments,
        )
    num_bins, num_heads, length, head_size = query.shape
    num_key_heads = key.shape[1]
    num_shared = num_heads // num_key_heads
    scale = head_size**-0.5 if scaling is None else scaling
    queries = (query * scale).reshape(num_bins, num_key_heads, num_shared * length, head_size)
    scores = queries @ key.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(num_bins, num_key_heads, num_shared, length, length)
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=query.device).tril()
    if attention_mask.is_floating_point():
        scores = scores + attention_mask[:, :, None].to(scores.dtype)
    else:
        scores = scores.masked_fill(~attention_mask[:, :, None], torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).view(num_bins, num_key_heads, num_shared * length, length)
    output = (weights @ value).reshape(num_bins, num_heads, length, value.shape[-1])
    return output.transpose(1, 2).contiguous(), None


def register_packed_attention() -> None:
    """Make `packed_attention` known to transformers under the name `IMPLEMENTATION`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def packed_mask(packed: PackedRows, *, implementation: str, dtype: torch.dtype, window: int | None = None) -> Mask:
    """Return the mask of packed rows in the form that an attention implementation takes.

    Args:
        packed: the rows.
        implementation: its name, as in `model.config._attn_implementation`.
        dtype: of the computation, for masks that are added to scores.
        window: see `PackedRows.attention_mask`.

    Returns:
        `[num_bins, 1, length, length]`, bool or additive; for `flex_attention` a `BlockMask`.
    """
    length = packed.input_ids.shape[1]
    if implementation == "flex_attention":
        return _block_mask(packed, window)
    mask = packed.attention_mask(window=window)
    is_product = implementation == IMPLEMENTATION and mask.device.type == "cpu" and length <= MAX_PRODUCT_LENGTH
    if implementation != "eager" and not is_product:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def _block_mask(packed: PackedRows, window: int | None) -> BlockMask:
    """`PackedRows.attention_mask` as a function of indices, of which only blocks are held in memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    subtree_end, depth = packed.subtree_end, packed.position_ids

    def is_seen(bin_index: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = (query >= key) & (query < subtree_end[bin_index, key])
        if window is not None:
            seen = seen & (depth[bin_index, query] - depth[bin_index, key] < window)
        return seen

    num_bins, length = packed.input_ids.shape
    return create_block_mask(is_seen, num_bins, None, length, length, device=str(packed.input_ids.device))
