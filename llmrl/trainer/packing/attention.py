"""What computes the attention of packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from llmrl.trainer.packing.masks import IMPLEMENTATION, Mask, PackedMask

_NUM_COMPILED = 64
"""Kernels of one process: by dtype, width of heads, window, cap, with and without gradients, not by length."""


def packed_attention(
    module: torch.nn.Module,
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
    """Attend by plain matrix products where `sdpa` is slower or cannot do it; anything else goes to `sdpa`.

    With a `PackedMask` (on CUDA) it is PyTorch's kernel for sequences of several lengths where rows share nothing, in
    half precision, and compiled `flex_attention` where they do; neither holds a mask or weights of all pairs. Otherwise
    it is `sdpa`, or plain matrix products where that is slower or cannot do it: for bins of a few hundred tokens the
    backward pass of PyTorch's CPU kernel takes several times as long as the two products it is made of, which an
    additive mask asks for. Query heads that share a key head are one product, so keys are not repeated. A soft cap on
    the scores, which `sdpa` leaves out in silence, is always computed here.

    Args:
        query: `[num_bins, num_heads, length, head_size]`.
        key, value: `[num_bins, num_key_heads, length, head_size]`.
        attention_mask: a `PackedMask`, or `[num_bins, 1, length, length]`, either bool or 0 and very negative in the
            dtype of the computation; None is causal.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2, arXiv:2408.00118, section 2).
        s_aux: `[num_heads]` sinks (gpt-oss, arXiv:2508.10925), scores of a token without a value; with a `PackedMask`.
        position_bias: is added to scores; without a soft cap and without a `PackedMask`.

    Raises:
        TypeError: if the model has sinks, biases or dropout where they are not known.
    """
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


# A compiled layer goes around it: its kernels are compiled by themselves, and for masks that are objects.
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
    """Return `[num_bins, length, num_heads, head_size]`, by a kernel that visits only what is seen."""
    num_bins, num_heads, length, head_size = query.shape
    # Bins end to end, so that shapes differ in one number, for all of which a second kernel is compiled.
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if torch.is_autocast_enabled(query.device.type):  # which knows neither kernel
        dtype = torch.get_autocast_dtype(query.device.type)
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
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
        assert isinstance(output, torch.Tensor)  # it is asked for nothing else
        return output.unflatten(0, (num_bins, length))
    output = _flex_attention(query.device.type)(
        *(tensor.transpose(0, 1)[None] for tensor in (query, key, value)),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask,
        scale=scaling,
        enable_gqa=is_grouped,
        # The kernel for fewer than 128 queries wants powers of two as numbers of heads.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is not None:  # a sink is one more term of each sum of exponentials
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
    """`flex_attention`, compiled where there are kernels to compile; an error rather than `[length, length]` scores."""
    if device_type == "cpu":
        return flex_attention
    # Not `dynamic=True`, which makes symbols of soft caps and scales, too, that `flex_attention` cannot take.
    options: dict[str, Any] = {"fullgraph": True, "recompile_limit": _NUM_COMPILED}
    return torch.compile(flex_attention, **options)


def register_packed_attention() -> None:
    """Make `packed_attention` known to transformers under the name `IMPLEMENTATION`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
