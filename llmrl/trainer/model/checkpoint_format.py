"""The weights of a transformers model in the format of its checkpoint, as engines load them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter, WeightTransform


@dataclass(frozen=True)
class CheckpointWeights:
    """Weights of a checkpoint, and the parameters that they are computed from.

    When transformers loads a checkpoint, it renames parameters, and joins or splits some of them:
    for example, the experts of a layer are one parameter, but several weights of the checkpoint.
    """

    name: str
    """Name of the weight, if the parameter is only renamed."""
    parameters: tuple[str, ...]
    """Names of the parameters."""
    converter: WeightConverter | None = None
    """transformers' conversion; None if there is one parameter, which is only renamed."""
    patterns: tuple[str, ...] = ()
    """The converter's pattern for each parameter."""
    model: PreTrainedModel | None = None

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of the checkpoint by name, often as views, from unsharded parameters by name."""
        if self.converter is None:
            return {self.name: tensors[self.parameters[0]]}
        assert self.model is not None
        converter = copy.deepcopy(self.converter)
        for name, pattern in zip(self.parameters, self.patterns, strict=True):
            converter.add_tensor(self.name, name, pattern, tensors[name])
        weights = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in weights.items()}


def checkpoint_weights(model: object, names: Iterable[str]) -> Iterator[CheckpointWeights]:
    """Yield the weights of a model's checkpoint for the names of its parameters, in their order.

    They are what transformers' `save_pretrained` would write: the conversions with which the model was loaded, or
    those of its class, are reversed. The parameters of other modules keep their names.

    Example:
        >>> [weights.name for weights in checkpoint_weights(torch.nn.Linear(2, 1), ["weight"])]
        ['weight']
    """
    conversions = conversions_of(model)
    if not conversions:
        for name in names:
            yield CheckpointWeights(name, (name,))
        return
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [one for one in reverse if isinstance(one, WeightRenaming)]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, reverse=True)
        groups.setdefault(renamed, []).append((name, pattern))
    for renamed, members in groups.items():
        members.sort(key=lambda member: dot_natural_key(member[0]))
        parameters = tuple(name for name, _ in members)
        patterns = tuple(pattern for _, pattern in members if pattern is not None)
        if patterns:
            yield CheckpointWeights(renamed, parameters, by_pattern[patterns[0]], patterns, model)
        else:
            yield CheckpointWeights(renamed, parameters)


def conversions_of(model: object) -> list[WeightTransform]:
    """Return the conversions with which transformers loaded a model, else those of its class.

    In reverse they restore the layout of the official checkpoint (Qwen3-VL's experts are transposed there).
    """
    conversions = copy.deepcopy(_conversions(model))
    # In reverse, operations that compare shapes with the model's would leave the model's layout unchanged.
    for operation in (one for conversion in conversions for one in getattr(conversion, "operations", ())):
        if hasattr(operation, "check_dims"):
            operation.check_dims = False
    return conversions


def _conversions(model: object) -> list[WeightTransform]:
    if getattr(model, "base_model_prefix", None) is None:
        return []
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    if not isinstance(model, PreTrainedModel):
        return []
    used = getattr(model, "_weight_conversions", None)
    if used is not None:
        return list(used)
    # Whether a checkpoint has such a prefix is known only if it was read.
    return [one for one in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(one, PrefixChange)]
