"""Gradient checkpointing in eval mode, so that dropout and other random layers stay off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


def set_scoring_mode(model: torch.nn.Module) -> None:
    """Put a model into eval mode, as in an engine, and keep gradient checkpointing active if it is enabled.

    transformers checkpoints a layer only in training mode, which also activates dropout, router noise and sampled
    experts. A layer is therefore in training mode when it decides to checkpoint, and in eval mode whenever it is
    computed. Models with their own checkpointing stay in training mode; `ExactnessProbe` checks the result.
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
    """Checkpoint function that computes its layer in eval mode."""

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
