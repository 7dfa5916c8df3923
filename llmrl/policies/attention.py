"""Attention for short packed bins on a CPU."""

from __future__ import annotations

from typing import Any

import torch

IMPLEMENTATION = "llmrl_packed"
MAX_PRODUCT_LENGTH = 256
"""Bins up to this length keep their attention weights for the backward pass; longer ones take `sdpa`."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with an additive mask as plain matrix products; anything else goes to `sdpa`.

    For bins of a few hundred tokens the backward pass of PyTorch's CPU kernel takes several times as long as the two
    products it is made of. Query heads that share a key head are one product, so keys are not repeated.

    Args:
        query: `[num_bins, num_heads, length, head_size]`.
        key, value: `[num_bins, num_key_heads, length, head_size]`.
        attention_mask: `[num_bins, 1, length, length]`, 0 or very negative, in the dtype of the computation.
    """
    if attention_mask is None or not attention_mask.is_floating_point() or dropout:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **arguments
        )
    num_bins, num_heads, length, head_size = query.shape
    num_key_heads = key.shape[1]
    num_shared = num_heads // num_key_heads
    scale = head_size**-0.5 if scaling is None else scaling
    queries = (query * scale).reshape(num_bins, num_key_heads, num_shared * length, head_size)
    scores = queries @ key.transpose(-1, -2)
    scores = scores.view(num_bins, num_key_heads, num_shared, length, length)
    scores = scores + attention_mask[:, :, None].to(scores.dtype)
    weights = scores.softmax(-1).view(num_bins, num_key_heads, num_shared * length, length)
    output = (weights @ value).view(num_bins, num_heads, length, head_size)
    return output.transpose(1, 2).contiguous(), None


def use_packed_attention(model: Any) -> None:
    """Have a transformers model call `packed_attention` where it would call `sdpa`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    model.set_attn_implementation(IMPLEMENTATION)
