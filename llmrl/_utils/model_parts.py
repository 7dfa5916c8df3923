"""Parts of transformers models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of a model's decoder, which may be part of a larger configuration."""
    return getattr(model.config, "text_config", None) or model.config


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return a causal language model without its head."""
    base = model.base_model
    return model.model if base is model and hasattr(model, "model") else base
