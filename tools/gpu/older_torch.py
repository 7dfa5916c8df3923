"""Adaptation of llmrl to a torch older than required, as a machine without a network may have."""

from __future__ import annotations

import functools
import inspect

import torch

RECOMPILE_LIMIT = 64


def adapt() -> list[str]:
    """Drop arguments that this torch does not know and that are not necessary; return their names."""
    from torch.nn.attention import varlen

    adapted = []
    if "recompile_limit" not in inspect.signature(torch.compile).parameters:
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        torch.compile = _without(torch.compile, "recompile_limit")
        adapted.append("torch.compile(recompile_limit)")
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        varlen.varlen_attn = _without(varlen.varlen_attn, "enable_gqa")
        adapted.append("varlen_attn(enable_gqa)")
    return adapted


def _without(function, name: str):
    @functools.wraps(function)
    def called(*arguments, **options):
        options.pop(name, None)
        return function(*arguments, **options)

    return called
