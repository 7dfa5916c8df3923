"""Gradient checkpointing without training mode: nothing that acts by chance is switched on with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


def set_scoring_mode(model: torch.nn.Module) -> None:
    """Set eval mode, in which a model computes what an engine computes, with gradient checkpointing where it is on.

    transformers checkpoints a layer in training mode alone, in which dropout, noise of routers and sampled experts act,
    too. So a layer is in training mode when it decides to checkpoint, and in eval mode when it is computed, in the
    backward pass as well. What it consists of is in eval mode throughout.

    Args:
        model: transformers model; one that does not checkpoint by transformers' layers is itself in training mode
            where it checkpoints, which `ExactnessProbe` compares.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.eval()
    flagged = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    layers = [module for module in flagged if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers or flagged:
        layer.training = True
    for layer in layers:
        if not isinstance(layer._gradient_checkpointing_func, _InEvalMode):
            layer._gradient_checkpointing_func = _InEvalMode(layer, layer._gradient_checkpointing_func)


@dataclass(slots=True, eq=False)
class _InEvalMode:
    """Checkpoints a layer that is in eval mode each time it is computed."""

    layer: torch.nn.Module
    checkpoint: Callable[..., object]

    def __call__(self, function: Callable[..., object], *inputs: object) -> object:
        return self.checkpoint(functools.partial(self._computed, function), *inputs)

    def _computed(self, function: Callable[..., object], *inputs: object) -> object:
        self.layer.training = False
        try:
            return function(*inputs)
        finally:
            self.layer.training = True
