"""Parts of transformers models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, TypeVar

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model")


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of a model's decoder, which may be part of a larger configuration."""
    return getattr(model.config, "text_config", None) or model.config


def has_encoders(model: object) -> bool:
    """Return whether a model's class has encoders of images or sound, even if they are not loaded."""
    return getattr(getattr(model, "config", None), "text_config", None) is not None and hasattr(model, "get_decoder")


def decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return a causal language model without its head and without encoders of images or sound."""
    if has_encoders(model):
        decoder: PreTrainedModel = model.get_decoder()
        is_whole = decoder is not model and decoder.get_output_embeddings() is not None
        return decoder_of(decoder) if is_whole else decoder
    base = model.base_model
    return model.model if base is model and hasattr(model, "model") else base


def without_adapters(model: Model) -> Model:
    """Return the base of a peft model, in which the adapted layers stay; any other model is returned unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a weight is quantized to 4 bits by bitsandbytes."""
    return getattr(weight, "quant_state", None) is not None


def has_quantized_base(model: torch.nn.Module) -> bool:
    """Return whether any weight of a model, such as the frozen base of its adapters, is quantized to 4 bits."""
    return any(map(is_quantized, model.parameters()))


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the dtype of computation: dequantized from 4 bits, or the weight itself."""
    if not is_quantized(weight):
        return weight
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[attr-defined]
    return values


def set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation of a model's decoder."""
    owner = decoder_of(model) if has_encoders(model) else model
    owner.set_attn_implementation(implementation)  # type: ignore[operator]  # a method of transformers' models


def load_language_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    distribute: Callable[[PreTrainedModel], object] | None = None,
    quantize: bool = False,
) -> PreTrainedModel:
    """Load the language model of a checkpoint under the checkpoint's own class, without encoders of images or sound.

    Encoders are None in the module tree; their weights are neither read nor allocated. Code that
    comes with a checkpoint is not run.

    Args:
        distribute: function that is called with the model while its parameters are on the meta device. Each rank reads
            only its own part of parameters that the function turns into `DTensor`s.
        quantize: whether to hold the weights of linear layers, except the head, in 4 bits (NF4, by bitsandbytes).

    Raises:
        ImportError: if the class needs a package that is not installed.
        OSError: if transformers finds no checkpoint or no weights.
        ValueError: if transformers refuses the checkpoint, if the weights cannot be read, or if
            bitsandbytes cannot quantize a layer.
    """
    import transformers
    from safetensors import SafetensorError

    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)  # the default asks on the terminal
    kind = class_with_images(config)
    options: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": False}
    if quantize:
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
        options["device_map"] = {"": device}
    try:
        if kind is None and distribute is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
            if not quantize:
                model.to(device)
        else:
            if distribute is not None:
                options["distributed_config"] = transformers.distributed.DistributedConfig()
            kind = kind or transformers.AutoModelForCausalLM._model_mapping[type(config)]
            with torch.device(device):
                model = _loaded_as(kind, distribute).from_pretrained(path, **options)
            model.__class__ = kind
    except (SafetensorError, UnpicklingError) as error:
        raise ValueError(f"{path} has no weights that can be read: {error!s:.200}") from error
    except RuntimeError as error:
        if not quantize:
            raise
        raise ValueError(f"{path} has layers that bitsandbytes cannot hold in 4 bits: {error!s:.200}") from error
    if quantize:
        _compute_as_in_training(model)
    return model


def _compute_as_in_training(model: PreTrainedModel) -> None:
    """Disable bitsandbytes' CPU kernel, which computes in bfloat16 without gradients and so differs from training."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _loaded_as(
    kind: type[PreTrainedModel], distribute: Callable[[PreTrainedModel], object] | None
) -> type[PreTrainedModel]:
    """Return a subclass that loads without encoders and distributes the model before its weights are read."""

    class LanguageModel(kind):
        def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
            super().__init__(config, *args, **kwargs)
            if has_encoders(self):
                self._keys_to_ignore_on_load_unexpected = {r".*"}  # unread weights of the checkpoint are expected
                leave_out_encoders(self)

        @classmethod
        def maybe_distribute_model(cls, model: PreTrainedModel, *others: object) -> PreTrainedModel:
            if distribute is not None:
                distribute(model)
            return model

    # transformers looks up the conversion of weight names by the name and module of the class.
    LanguageModel.__name__ = kind.__name__
    LanguageModel.__module__ = kind.__module__
    return LanguageModel


def class_with_images(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return transformers' class for a checkpoint with a language model and encoders; None for other checkpoints."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if getattr(config, "text_config", None) is None:
        return None
    usual = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    # A checkpoint with its own code may name a class that transformers has under another name (Kimi K2.5).
    names = [*(config.architectures or ()), usual]
    return next((getattr(transformers, name) for name in names if name and hasattr(transformers, name)), None)


def language_parameters(model: PreTrainedModel) -> set[int]:
    """Return the `id`s of the parameters that compute text: those of decoder, embedding and head."""
    parts = [decoder_of(model), model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(parameter) for part in parts if part is not None for parameter in part.parameters()}


def leave_out_encoders(model: PreTrainedModel) -> None:
    """Set to None, in place, the modules and parameters of a model that do not compute text.

    Example:
        >>> import transformers
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> text = transformers.LlamaConfig(**sizes, vocab_size=8)
        >>> vision = transformers.SiglipVisionConfig(**sizes)
        >>> config = transformers.LlavaConfig(text_config=text, vision_config=vision)
        >>> with torch.device("meta"):
        ...     model = transformers.LlavaForConditionalGeneration(config)
        >>> leave_out_encoders(model)
        >>> sorted({name.split(".")[1] for name, _ in model.named_parameters()}), model.model.vision_tower
        (['language_model', 'weight'], None)
    """
    _leave_out(model, language_parameters(model))


def _leave_out(module: torch.nn.Module, kept: set[int]) -> None:
    for name, child in list(module.named_children()):
        ids = {id(parameter) for parameter in child.parameters()}
        if ids and not ids & kept:
            module._modules[name] = None
        elif ids - kept:
            _leave_out(child, kept)
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and id(parameter) not in kept:
            module._parameters[name] = None
            # Otherwise transformers initialises the missing parameter (LLaVA-NeXT's image_newline).
            module._is_hf_initialized = True  # type: ignore[assignment]
