"""Attention of packed rows with block masks instead of a dense mask: numerical error and size of the masks.

On a CPU, blocks are computed as on a GPU, by an uncompiled `flex_attention`. Values and gradients are compared with
`sdpa` under the dense mask, for single rows and for sixteen answers to a prompt, and the bytes of each mask are
counted. On a GPU, `tools/gpu/run.py attention` measures seconds and peak memory.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.attention import flex_attention as flex

from benchmarks.pack import group
from llmrl.trainer.packing import masks
from llmrl.trainer.packing.attention import packed_attention
from llmrl.trainer.packing.packed_rows import PackedRows, pack_rows

LENGTHS = (1024, 4096, 16_384, 32_768)
EXACT_LENGTH = 1024
"""Length for the comparison; longer ones would need the scores of all pairs in memory without compilation."""
WINDOW = 100
GOAL = 0.01
NUM_HEADS, NUM_KEY_HEADS, HEAD_SIZE = 4, 2, 16


def _packed(length: int, *, is_shared: bool) -> PackedRows:
    """Return packed rows of about `length` tokens: a single row, or sixteen that share three quarters."""
    shape = (length * 3 // 4, length // 64 + 1, 16) if is_shared else (1, length, 1)
    (packed,) = pack_rows(*group(*shape), token_budget=2 * length)
    return packed


def _mask(packed: PackedRows, *, is_dense: bool, window: int | None) -> masks.Mask:
    devices = frozenset() if is_dense else frozenset({"cpu"})
    with mock.patch.object(masks, "FUSED_DEVICES", devices):
        implementation = "sdpa" if is_dense else masks.IMPLEMENTATION
        return masks.packed_mask(packed, implementation=implementation, dtype=torch.float32, window=window)


def _num_bytes(mask: masks.Mask) -> int:
    held = [mask] if isinstance(mask, torch.Tensor) else list(vars(mask).values())
    return sum(one.numel() * one.element_size() for one in held if isinstance(one, torch.Tensor))


def _error(packed: PackedRows, window: int | None) -> float:
    """Return the largest difference of values and gradients, relative to the largest absolute value of each."""
    results = []
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = NUM_HEADS // NUM_KEY_HEADS, True
    for is_dense in (True, False):
        generator = torch.Generator().manual_seed(0)
        shape = (*packed.input_ids.shape,)
        query, key, value = leaves = [
            torch.randn(*shape, num, HEAD_SIZE, generator=generator).transpose(1, 2).requires_grad_()
            for num in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
        ]
        output, _ = packed_attention(module, query, key, value, _mask(packed, is_dense=is_dense, window=window))
        output.backward(torch.randn(output.shape, generator=generator))
        results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    return max(float((ours - dense).abs().max() / dense.abs().max()) for dense, ours in zip(*results, strict=True))


def run() -> dict[str, Any]:
    """Compare, count bytes, print the table, and return the result."""
    torch.manual_seed(0)
    medians: dict[str, float] = {}
    # On a CPU, torch refuses gradients of uncompiled `flex_attention`, although they work.
    with (
        mock.patch.object(flex, "_validate_device", lambda *tensors: None),
        mock.patch.object(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        for is_shared in (False, True):
            for window in (None, WINDOW):
                name = f"{'shared prefix' if is_shared else 'alone'}{', window' if window else ''}"
                medians[f"{name}: relative error"] = _error(_packed(EXACT_LENGTH, is_shared=is_shared), window)
    if max(medians.values()) > 1e-5:
        raise AssertionError(f"blocks and the dense mask disagree: {medians}")
    ratio = 0.0
    for length in LENGTHS:
        packed = _packed(length, is_shared=True)
        dense, ours = (_num_bytes(_mask(packed, is_dense=is_dense, window=None)) for is_dense in (True, False))
        medians[f"mask of {length} tokens, MiB: dense"] = dense / 2**20
        medians[f"mask of {length} tokens, MiB: blocks"] = ours / 2**20
        ratio = ours / dense
    table = Table("measured", "number", title="attention")
    for name, value in medians.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return {
        "name": "attention",
        "ratio": ratio,
        "ratio_of": f"bytes of a block mask to those of a dense mask, {LENGTHS[-1]} tokens",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": medians,
    }
