"""The trainer's weights as the engine wants them: checkpoint names, the engine's dtype, whole tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Wrappers put these into names; a checkpoint has none of them.
_WRAPPER_PARTS = re.compile(r"^module\.|(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")

ModelMetadata = dict[str, tuple[torch.dtype, torch.Size]]


def checkpoint_name(name: str) -> str:
    """A parameter's name without the parts that compile, DDP, FSDP or checkpointing put in.

    Example:
        >>> checkpoint_name("module.model.layers.0._orig_mod.weight")
        'model.layers.0.weight'
    """
    return _WRAPPER_PARTS.sub("", name)


def get_model_metadata(model: torch.nn.Module, dtype: torch.dtype | None = None) -> ModelMetadata:
    """Name to `(dtype, shape)` of each weight that an update sends; tied weights come once.

    Args:
        model: the trainer's.
        dtype: that floating-point weights are sent in; their own when not given.

    Raises:
        TypeError: for something without parameters, or a model with unmerged adapters.

    Example:
        >>> get_model_metadata(torch.nn.Linear(2, 1), dtype=torch.bfloat16)["weight"]
        (torch.bfloat16, torch.Size([1, 2]))
    """
    return {name: (_sent_dtype(tensor, dtype), tensor.shape) for name, tensor in _named_weights(model)}


def named_weights(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight, gathered when it is sharded (a collective: every rank iterates), in its own dtype."""
    for name, tensor in _named_weights(model):
        full_tensor = getattr(tensor, "full_tensor", None)
        yield name, (full_tensor() if callable(full_tensor) else tensor).detach()


def make_weight_source(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    override: Mapping[str, torch.Tensor] | None = None,
) -> Any:
    """The model as vLLM's `WeightSource`, cast to `dtype` on the way; while `override` has weights, those instead."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class CastingSource(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [
                ParamMeta(name, _sent_dtype(tensor, dtype), tuple(tensor.shape))
                for name, tensor in _named_weights(override or model)
            ]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named_weights(override or model):
                yield name, tensor.to(_sent_dtype(tensor, dtype))

        def uncast(self) -> Iterator[tuple[str, torch.Tensor]]:
            """For a transport that casts while it copies."""
            return named_weights(override or model)

    return CastingSource()


def _named_weights(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(model, Mapping):
        named: Any = model.items()
    elif isinstance(model, torch.nn.Module):
        if getattr(model, "peft_config", None):
            raise TypeError("model has adapters; merge them first (model.merge_and_unload()).")
        named = model.named_parameters()
    else:
        raise TypeError(f"model must be a torch.nn.Module or a mapping of tensors, got {type(model).__name__}.")
    for name, tensor in named:
        yield checkpoint_name(name), tensor


def _sent_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
