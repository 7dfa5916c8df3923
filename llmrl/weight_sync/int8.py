"""Weights for engines that compute in int8, rounded as in an int8 checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llmrl.engines.vllm.quantized import int8_layers, to_int8
from llmrl.trainer.model.checkpoint_format import checkpoint_weights
from llmrl.weight_sync.source import ModelWeights, WeightMeta, Weights, base_of, checkpoint_name


class Int8Weights(ModelWeights):
    """A model's weights, with linear layers except the head in int8 and one scale per output.

    The format is that of compressed-tensors' "W8A8" checkpoints: `round(weight / scale)` is in -127 to 127, and `scale`
    is the row's largest magnitude / 127. Raises ValueError for a sharded model, weights given by
    name, and matrices outside linear layers and embeddings (experts, convolutions).

    Example:
        >>> source = Int8Weights(torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False)))
        >>> [(meta.name, meta.dtype) for meta in source.metadata()]
        [('0.weight', torch.int8), ('0.weight_scale', torch.float32)]
    """

    def __init__(self, model: Weights, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, dtype)
        if not isinstance(model, torch.nn.Module) or self.is_sharded:
            raise ValueError(
                "engines in int8 take the weights of a whole model of this process, neither sharded nor by name: start "
                "the engines without quantization."
            )
        names = (name.removesuffix(".base_layer") for name in int8_layers(model))
        rounded = [checkpoint_name(f"{name}.weight") for name in names]
        self._rounded = {weights.name for weights in checkpoint_weights(base_of(model), rounded)}

    def metadata(self) -> list[WeightMeta]:
        """Return the metadata of each weight, in the order of iteration."""
        if self.override:
            raise ValueError("update_weights(weights=...) sends weights unchanged, and the engines take int8 weights.")
        sent = []
        for meta in super().metadata():
            if meta.name in self._rounded:
                sent.append(meta._replace(dtype=torch.int8))
                sent.append(WeightMeta(f"{meta.name}_scale", torch.float32, (meta.shape[0], 1)))
            else:
                sent.append(meta)
        return sent

    def uncast(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each weight, rounded or unchanged."""
        for name, tensor in super().uncast():
            if name in self._rounded:
                rounded, scale = to_int8(tensor)
                yield name, rounded
                yield f"{name}_scale", scale
            else:
                yield name, tensor

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, (name, tensor) in zip(self.metadata(), self.uncast(), strict=True):
            yield name, tensor.to(meta.dtype)
