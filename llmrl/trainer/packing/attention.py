"""Attention over packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from llmrl.trainer.context import ContextRanks
from llmrl.trainer.packing.masks import IMPLEMENTATION, Mask, PackedMask

CONTEXT_RANKS = "context_ranks"
"""Name of the attribute of a model's modules with its `ContextRanks`, set if rows are split over ranks."""

_NUM_COMPILED = 64
"""Maximum number of compiled kernels per process; they differ by dtype, head size, window, cap and gradient."""


def packed_attention(
    module: torch.nn.Module | SimpleNamespace,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention over packed rows with the fastest exact implementation.

    With a `PackedMask` (on CUDA), PyTorch's variable-length kernel computes half-precision rows that share nothing, and
    compiled `flex_attention` all others. Otherwise `sdpa` is used, or matrix products if the mask is additive (short
    bins on CPU, where `sdpa`'s backward pass is slow) or scores have a soft cap, which `sdpa` ignores.

    Args:
        query: `[num_bins, num_heads, length, head_size]`.
        key, value: `[num_bins, num_key_heads, length, head_size]`.
        attention_mask: a `PackedMask`, or `[num_bins, 1, length, length]`, either bool or additive; None is causal.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        s_aux: `[num_heads]` attention sinks (gpt-oss, arXiv:2508.10925); only with a `PackedMask`.

    If rows are split over ranks (`ContextRanks`), tensors hold this rank's part of each row, but the mask whole rows.

    Raises TypeError if sinks, biases or dropout are not supported in this combination.
    """
    ranks: ContextRanks | None = getattr(module, CONTEXT_RANKS, None)
    if ranks is not None and attention_mask is not None:
        length = _bin_length(query, attention_mask)
        if length > query.shape[2]:
            if position_bias is not None:
                raise TypeError("attention with position biases cannot be split over ranks: use context_ranks=1.")
            query, key, value = (ranks.by_heads(tensor, length) for tensor in (query, key, value))
            sinks = None if s_aux is None else s_aux.chunk(ranks.size)[ranks.rank]
            own = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
            output, _ = packed_attention(
                own, query, key, value, attention_mask, scaling, dropout, softcap, sinks, None, **arguments
            )
            return ranks.by_tokens(output), None
    if isinstance(attention_mask, PackedMask):
        if dropout or position_bias is not None:
            raise TypeError("dropout and position biases are computed by attn_implementation='eager'")
        return _fused_attention(query, key, value, attention_mask, scaling, softcap, s_aux), None
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
    if scaling is None:
        scaling = head_size**-0.5
    queries = (query * scaling).reshape(num_bins, num_key_heads, num_shared * length, head_size)
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


def _bin_length(query: torch.Tensor, mask: Mask) -> int:
    if isinstance(mask, PackedMask):
        return mask.seq_lengths[0] // query.shape[0]
    return mask.shape[-1]


# Excluded from compiled layers: its kernels are compiled separately, and compilation cannot trace mask objects.
@functools.partial(torch.compiler.disable, recursive=False)
def _fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: PackedMask,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[num_bins, length, num_heads, head_size]`, from a kernel that skips masked blocks."""
    num_bins, num_heads, length, head_size = query.shape
    # Concatenating the bins leaves one varying dimension, so the kernel is compiled only once more for all lengths.
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # autocast covers neither kernel
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    is_grouped = key.shape[1] != num_heads
    is_flash = query.dtype.itemsize == 2 and head_size == value.shape[-1] and head_size % 8 == 0 and head_size <= 256
    if is_flash and mask.bounds is not None and softcap is None and sinks is None:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            query,
            key,
            value,
            mask.bounds,
            mask.bounds,
            mask.longest,
            mask.longest,
            scale=scaling,
            window_size=(-1 if mask.window is None else mask.window - 1, 0),
            enable_gqa=is_grouped,
        )
        assert isinstance(output, torch.Tensor)  # no auxiliary outputs are requested
        return output.unflatten(0, (num_bins, length))
    output = _flex_attention(query.device.type)(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=is_grouped,
        # The kernel for fewer than 128 queries requires powers of two as numbers of heads.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:  # a sink adds one term to each sum of exponentials
        output, auxiliary = output
        output = output * torch.sigmoid(auxiliary.lse - sinks[:, None].float())[..., None].to(output.dtype)
    return output[0].transpose(0, 1).unflatten(0, (num_bins, length))


def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    """Return `flex_attention`, compiled except on CPU; it raises rather than materialise `[length, length]` scores."""
    if device_type == "cpu":
        return flex_attention
    # `dynamic=True` would make soft caps and scales symbolic, which `flex_attention` does not support.
    options: dict[str, Any] = {"fullgraph": True, "recompile_limit": _NUM_COMPILED}
    return torch.compile(flex_attention, **options)


def register_packed_attention() -> None:
    """Register `packed_attention` in transformers under the name `IMPLEMENTATION`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
