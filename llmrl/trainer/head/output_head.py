"""The output head as one weight matrix, including tied, adapted and sharded heads."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial


class OutputHead:
    """Weight and bias of a linear output head, which may be tied, sharded, or adapted or replaced by peft.

    Raises TypeError if the head is not linear, or has DoRA or a LoRA bias.

    Example:
        >>> OutputHead(torch.nn.Linear(4, 9, bias=False)).weight().shape
        torch.Size([9, 4])
    """

    def __init__(self, head: torch.nn.Module) -> None:
        self._head: Any = head  # may be one of peft's layer classes
        self._linear()

    def _linear(self) -> torch.nn.Linear:
        head = self._head
        if hasattr(head, "modules_to_save"):  # peft trains a copy
            head = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapters[0]]
        if hasattr(head, "lora_A"):
            if any(getattr(head, "use_dora", {}).values()) or any(getattr(head, "lora_bias", {}).values()):
                raise TypeError("The output head has DoRA or a LoRA bias; use plain LoRA, or do not adapt the head.")
            head = head.base_layer
        if not isinstance(head, torch.nn.Linear):
            raise TypeError(f"The model must have a linear output head, got {type(head).__name__}.")
        return head

    @property
    def device(self) -> torch.device:
        """Device of the weight."""
        return self._linear().weight.device

    def weight(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return `[vocab_size, hidden_size]`, differentiable; with LoRA, the sum of the base weight and its update.

        With `dtype`, a sharded weight is cast before it is gathered; its gradient is summed in the weight's dtype.
        """
        head = self._head
        is_adapted = hasattr(head, "lora_A") and not head.disable_adapters and not head.merged
        weight = self._linear().weight
        if dtype is not None and not is_adapted and isinstance(weight, DTensor):
            return _Gathered.apply(weight, dtype)
        weight = _whole(weight)
        if is_adapted:
            for name in head.active_adapters:
                if name in head.lora_A:
                    update = _whole(head.lora_B[name].weight) @ _whole(head.lora_A[name].weight)
                    weight = weight + update * head.scaling[name]
        return weight.to(dtype=dtype)

    def bias(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """Return the bias `[vocab_size]`, or None if the head has none."""
        bias = self._linear().bias
        return None if bias is None else _whole(bias).to(dtype=dtype)


class _Gathered(torch.autograd.Function):
    """Cast and gather of a sharded parameter; its gradient is summed over ranks in the parameter's own dtype."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        ctx.mesh = parameter.device_mesh
        ctx.placements = parameter.placements
        return parameter.to(dtype).full_tensor()  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = DTensor.from_local(grads[0].to(ctx.dtype), ctx.mesh, [Partial()] * ctx.mesh.ndim)
        return parts.redistribute(placements=ctx.placements), None


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    """Gather a sharded parameter; its gradient is summed over ranks and scattered."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim)
