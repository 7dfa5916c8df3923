"""Weight sync of LoRA adapters alone, without the base model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from llmrl.engines.base import TransferInfo
from llmrl.engines.vllm.updates import shape_of_model
from llmrl.trainer.model.checkpoint_format import checkpoint_weights
from llmrl.weight_sync.channels import Channel, Client, Connection, StagedConnection
from llmrl.weight_sync.source import (
    LazyWeight,
    ModelWeights,
    WeightMeta,
    Weights,
    base_of,
    checkpoint_name,
    require_plain_adapters,
    whole,
)

_PREFIX = "base_model.model."
"""Prefix of names in peft's files."""


class AdapterWeights(ModelWeights):
    """The matrices A and B of a model's LoRA adapters, under the names of peft's files; B includes the scale.

    Raises TypeError at each use if the model has no adapters, trains other weights, or has adapters that engines do
    not support: of embeddings or output heads, DoRA, biases, several active adapters.
    """

    def _named(self) -> Iterator[tuple[str, Any]]:
        if self.override:
            raise ValueError("update_weights(weights=...) takes whole models, and this sender sends adapters alone.")
        return _matrices(self._model)

    @property
    def _format(self) -> object:
        return None  # `_matrices` already yields the names of peft's files, so nothing is converted

    @property
    def rank(self) -> int:
        """Highest rank of the adapters."""
        return max(meta.shape[0] for meta in self.metadata() if meta.name.endswith(".lora_A.weight"))

    @property
    def model_shape(self) -> dict[str, int]:
        """Shape of the base model, for comparison with the engine's."""
        config = getattr(self._model, "config", None)
        return {} if config is None else shape_of_model(config.get_text_config())


@dataclass(frozen=True)
class _ScaledWeight(LazyWeight):
    scale: float

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        return whole(self.weight) * self.scale


def _matrices(model: Weights) -> Iterator[tuple[str, Any]]:
    if not isinstance(model, torch.nn.Module) or not getattr(model, "peft_config", None):
        raise TypeError(
            "lora='adapter' sends adapters alone, and the registered model has none, so that all its weights are "
            "trained: load it with adapters (model.lora.rank=16), or leave lora='merged'."
        )
    require_plain_adapters(model)
    beside = [name for name, weight in model.named_parameters() if weight.requires_grad and ".lora_" not in name]
    if beside:
        raise TypeError(
            f"{len(beside)} weights are trained beside the adapters, among them {checkpoint_name(beside[0])}, and "
            "lora='adapter' would leave them out: send merged weights (lora='merged')."
        )
    outside = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}  # type: ignore[operator]
    for name, layer in model.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        name = checkpoint_name(name)
        if layer.lora_embedding_A or id(layer) in outside:
            raise TypeError(
                f"{name} is adapted, and vLLM adapts neither embeddings nor the output head: leave it out of "
                "target_modules, or send merged weights (lora='merged')."
            )
        if layer.merged:
            raise TypeError(f"the adapter of {name} is merged into its weight: call model.unmerge_adapter() first.")
        (weights,) = checkpoint_weights(base_of(model), [f"{name}.weight"])
        if weights.converter is not None:
            raise TypeError(
                f"{name} is adapted, and a checkpoint joins or splits its weight: leave it out of target_modules, or "
                "send merged weights (lora='merged')."
            )
        name = weights.name.removesuffix(".weight")
        active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
        if len(active) > 1:
            raise TypeError(f"{name} has {len(active)} active adapters, {active}; only one can be sent.")
        for adapter in active:
            yield f"{_PREFIX}{name}.lora_A.weight", layer.lora_A[adapter].weight
            scaled = _ScaledWeight(layer.lora_B[adapter].weight, layer.scaling[adapter])
            yield f"{_PREFIX}{name}.lora_B.weight", scaled


class AdapterChannel(Channel):
    """Channel that sends adapters, which are a few megabytes, to the engine's own process on any host."""

    def __init__(self, source: AdapterWeights) -> None:
        self._source = source
        self._staged: TransferInfo = {}
        self._version: int | None = None

    @property
    def staged_version(self) -> int | None:
        """Version of the staged adapters."""
        return self._version if self._staged else None

    def stage(self, version: int | None) -> int:
        """Serialise the adapters in memory."""
        assert version is not None, "this channel needs an engine"
        self._staged = {}
        weights = _as_file({name: tensor.cpu().contiguous() for name, tensor in self._source})
        self._staged = {"weights": weights, "rank": self._source.rank}
        self._version = version
        return version

    def staged(self) -> TransferInfo:
        """Return the staged adapters. Raises RuntimeError if there are none."""
        if not self._staged:
            raise RuntimeError("no adapters are staged.")
        return self._staged

    def roll_back(self) -> None:
        """Discard the staged adapters."""
        self._staged = {}

    def connect(self, client: Client) -> Connection:
        """Check that the engine has the same model and a sufficient rank, and load adapters of zeros as a test."""
        source = self._source
        zeros = {meta.name: torch.zeros(*_of_rank_1(meta), dtype=meta.dtype) for meta in source.metadata()}
        info = {"model": source.model_shape, "rank": source.rank, "zeros": _as_file(zeros)}
        client.init_weight_transfer_engine(info)
        return StagedConnection(client, self.staged)

    def close(self) -> None:
        """Discard the staged adapters."""
        self._staged = {}


def _of_rank_1(meta: WeightMeta) -> tuple[int, int]:
    return (1, meta.shape[1]) if meta.name.endswith(".lora_A.weight") else (meta.shape[0], 1)


def _as_file(tensors: dict[str, torch.Tensor]) -> bytes:
    import safetensors.torch

    return safetensors.torch.save(tensors)
