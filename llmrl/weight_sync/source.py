"""The trainer's weights in the form that engines need: checkpoint names, the engines' dtype, whole tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from llmrl._utils.model_parts import dequantized, has_encoders, is_quantized, language_parameters, without_adapters

if TYPE_CHECKING:
    from llmrl.trainer.model.checkpoint_format import CheckpointWeights

# Parts of parameter names that wrappers add; checkpoints do not have them.
_WRAPPER = r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
_WRAPPER_PARTS = re.compile(rf"^(?:{_WRAPPER})*(?:module\.)?(?:{_WRAPPER})*(?:base_model\.model\.)?|(?<=\.){_WRAPPER}")

Weights: TypeAlias = torch.nn.Module | Mapping[str, torch.Tensor]
"""A model, or tensors by checkpoint name."""
ModelMetadata = dict[str, tuple[torch.dtype, torch.Size]]


def checkpoint_name(name: str) -> str:
    """Return a parameter's name without the parts added by torch.compile, DDP, FSDP or checkpointing.

    Example:
        >>> checkpoint_name("module.model.layers.0._orig_mod.weight")
        'model.layers.0.weight'
    """
    return _WRAPPER_PARTS.sub("", name)


def get_model_metadata(model: Weights, dtype: torch.dtype | None = None) -> ModelMetadata:
    """Return `(dtype, shape)` by name of each weight that an update sends; tied weights appear once.

    Names and shapes are those of the model's checkpoint. Floating-point weights get `dtype`, their own by default.
    Raises TypeError if the model has no parameters, or adapters that cannot be merged.

    Example:
        >>> get_model_metadata(torch.nn.Linear(2, 1), dtype=torch.bfloat16)["weight"]
        (torch.bfloat16, torch.Size([1, 2]))
    """
    metadata = ModelWeights(model_of(model), dtype).metadata()
    return {meta.name: (meta.dtype, torch.Size(meta.shape)) for meta in metadata}


def model_of(given: Weights) -> Weights:
    """Return the model of a policy (`TransformersWrapper`), and anything else unchanged."""
    from tensordict.nn import TensorDictModuleBase  # may be missing in an engine's process

    model = getattr(given, "model", None)
    if isinstance(given, TensorDictModuleBase) and isinstance(model, torch.nn.Module):
        return model
    return given


def named_weights(model: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter in its own dtype, gathered (every rank must iterate) and with adapters merged.

    Names are the model's own, without the parts that wrappers add; image encoders are left out.
    """
    for name, tensor in _named_weights(model):
        yield name, whole(tensor)


class WeightMeta(NamedTuple):
    """Name, dtype and shape of a weight to send."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class ModelWeights:
    """The trainer's weights, read anew at each iteration and cast to `dtype`; also vLLM's `WeightSource`."""

    def __init__(self, model: Weights, dtype: torch.dtype | None = None) -> None:
        self._model = model
        self._dtype = dtype
        self.override: Mapping[str, torch.Tensor] = {}
        """Weights to send instead of the model's; ignored if empty."""
        self._gathering: Iterator[tuple[str, torch.Tensor]] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether weights are sharded over processes (FSDP2's `DTensor`)."""
        return any(_is_sharded(tensor) for tensor in self._tensors())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(iter(self._tensors())).device

    def _tensors(self) -> Iterable[torch.Tensor]:
        model = self._model
        return model.parameters() if isinstance(model, torch.nn.Module) else model.values()

    def metadata(self) -> list[WeightMeta]:
        """Return the metadata of each weight, in the order of iteration, without gathering."""
        metadata = []
        for weights, parameters in self._weights():
            if weights.converter is None:
                converted: Mapping[str, torch.Tensor | LazyWeight] = {weights.name: parameters[weights.parameters[0]]}
            else:
                with torch.device("meta"):
                    empty = {name: torch.empty(one.shape, dtype=one.dtype) for name, one in parameters.items()}
                converted = weights.convert(empty)
            for name, one in converted.items():
                metadata.append(WeightMeta(name, _sent_dtype(one, self._dtype), tuple(one.shape)))
        return metadata

    @property
    def _format(self) -> object:
        """The unwrapped model, for its checkpoint's names; None if `override` has these names already."""
        if self.override:
            known = {meta.name for meta in ModelWeights(self._model).metadata()}
            if known.issuperset(name for name, _ in self._named()):
                return None
        return base_of(self._model)

    def _named(self) -> Iterator[tuple[str, torch.Tensor | LazyWeight]]:
        return _named_weights(self.override or self._model)

    def _weights(self) -> Iterator[tuple[CheckpointWeights, dict[str, torch.Tensor | LazyWeight]]]:
        """Yield the weights of the checkpoint, and the parameters that they are computed from."""
        from llmrl.trainer.model.checkpoint_format import checkpoint_weights  # not in an engine's process

        named = dict(self._named())
        for weights in checkpoint_weights(self._format, named):
            yield weights, {name: named[name] for name in weights.parameters}

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for weights, parameters in self._weights():
            yield from weights.convert({name: whole(one) for name, one in parameters.items()}).items()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.uncast():
            yield name, tensor.to(_sent_dtype(tensor, self._dtype))

    def uncast(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over the weights without casting, for a channel that casts while it copies."""
        self._gathering = self._gathered()
        return self._gathering

    def restart(self) -> None:
        """Discard an unfinished iteration."""
        self._gathering = None

    def gather_the_rest(self) -> None:
        """Finish the iteration together with the other ranks, if an update ends before its last weight."""
        for _ in self.uncast() if self._gathering is None else self._gathering:
            pass


def _unquantized_form(weight: torch.Tensor) -> torch.Tensor:
    """Return an object with the dtype and shape that a weight has without quantization."""
    form: torch.Tensor = weight.quant_state if is_quantized(weight) else weight  # type: ignore[attr-defined]
    return form


@dataclass(frozen=True)
class LazyWeight:
    """A weight that is computed when it is sent, with the dtype and shape of the unquantized `weight`."""

    weight: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weight."""
        return _unquantized_form(self.weight).dtype

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight."""
        return _unquantized_form(self.weight).shape

    def is_floating_point(self) -> bool:
        """Whether the weight has a floating-point dtype, and is therefore cast."""
        return self.dtype.is_floating_point

    def whole(self) -> torch.Tensor:
        """Return the weight, computed and gathered."""
        raise NotImplementedError


@dataclass(frozen=True)
class _QuantizedWeight(LazyWeight):
    """Frozen weight in 4 bits, sent as the dequantized values with which the model computes."""

    def whole(self) -> torch.Tensor:
        return dequantized(self.weight)


@dataclass(frozen=True)
class _AdaptedWeight(LazyWeight):
    """Weight of a layer with unmerged adapters, which are added."""

    layer: Any  # peft's

    @torch.no_grad()
    def whole(self) -> torch.Tensor:
        weight = dequantized(self.weight)
        for adapter in self.layer.active_adapters:
            if adapter in self.layer.lora_A or adapter in self.layer.lora_embedding_A:
                update = self.layer.get_delta_weight(adapter)
                if _is_sharded(update) != _is_sharded(weight):
                    update = whole(update)
                    weight = whole(weight)
                # Adding shards to shards gathers one whole matrix instead of three.
                weight = weight + update.to(weight.dtype)
        return whole(weight)


def _is_sharded(tensor: object) -> bool:
    return callable(getattr(tensor, "full_tensor", None))


def whole(tensor: Any) -> torch.Tensor:
    """Return a tensor gathered if it is sharded (collective), and computed if it is lazy."""
    if isinstance(tensor, LazyWeight):
        return tensor.whole().detach()
    return (tensor.full_tensor() if _is_sharded(tensor) else tensor).detach()


def base_of(model: object) -> object:
    """Return a model without the wrappers of DDP, torch.compile and peft, or any other object unchanged."""
    model = getattr(model, "module", model) if type(model).__name__ == "DistributedDataParallel" else model
    model = getattr(model, "_orig_mod", model)
    return without_adapters(model)


def _named_weights(model: Weights) -> Iterator[tuple[str, torch.Tensor | LazyWeight]]:
    if isinstance(model, Mapping):
        named: Iterable[tuple[str, torch.Tensor | LazyWeight]] = _once(model)
    elif isinstance(model, torch.nn.Module):
        named = _with_adapters(model) if getattr(model, "peft_config", None) else model.named_parameters()
        base = base_of(model)
        if has_encoders(base):
            text = language_parameters(base)
            named = [(name, one) for name, one in named if id(getattr(one, "weight", one)) in text]
    else:
        raise TypeError(f"model must be a torch.nn.Module or a mapping of tensors, got {type(model).__name__}.")
    for name, tensor in named:
        yield checkpoint_name(name), tensor


def _once(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tied weights once, like `named_parameters`."""
    seen = set()
    for name, tensor in weights.items():
        address = 0 if _is_sharded(tensor) else tensor.data_ptr()
        memory = (address, tensor.shape, tensor.stride(), tensor.dtype) if address else id(tensor)
        if memory not in seen:
            yield name, tensor
        seen.add(memory)


def require_plain_adapters(model: torch.nn.Module) -> None:
    """Raise TypeError unless adapters (peft's) only add a product of two matrices to weights."""
    for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]  # of a peft model
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            raise TypeError(f"adapter {name!r} is {config.peft_type}; only LoRA is merged on the way to the engine.")
        for option in ("modules_to_save", "trainable_token_indices"):
            if getattr(config, option, None):
                raise TypeError(f"adapter {name!r} trains whole modules or tokens beside LoRA ({option}); merge it.")
        if getattr(config, "bias", "none") != "none":
            raise TypeError(f"adapter {name!r} trains biases beside LoRA (bias={config.bias!r}); merge it yourself.")
    num_names = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            _require_plain_lora(name, layer, num_names)


def _with_adapters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor | LazyWeight]]:
    require_plain_adapters(model)
    layers = dict(model.named_modules())
    for name, tensor in model.named_parameters():
        prefix, _, kind = name.rpartition(".base_layer.")
        if prefix:
            is_adapted = kind == "weight" and not layers[prefix].merged
            yield f"{prefix}.{kind}", _AdaptedWeight(tensor, layers[prefix]) if is_adapted else _lazy(tensor)
        elif ".lora_" not in name:
            yield name, _lazy(tensor)


def _lazy(tensor: torch.Tensor) -> torch.Tensor | LazyWeight:
    return _QuantizedWeight(tensor) if is_quantized(tensor) else tensor


def _require_plain_lora(name: str, layer: Any, num_names: Counter[int]) -> None:
    """Raise TypeError if a layer's adapter is more than an update added to its own weight."""
    variants = {type(variant).__name__ for variant in layer.lora_variant.values()}
    if variants or any(layer.lora_bias.values()) or hasattr(layer, "parameter_name"):
        what = ", ".join(sorted(variants)) or ("a bias" if any(layer.lora_bias.values()) else "a bare parameter")
        raise TypeError(
            f"the adapter of {name} is not plain LoRA of a weight ({what}) and is not merged on the way; merge it "
            "first (model.merge_and_unload())."
        )
    if num_names[id(layer.get_base_layer().weight)] > 1:
        raise TypeError(
            f"{name} is adapted and shares its weight with another layer (a head tied to its embedding, say): merged, "
            "the two would differ, and an engine ties them. Leave it out of target_modules."
        )


def _sent_dtype(tensor: torch.Tensor | LazyWeight, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
