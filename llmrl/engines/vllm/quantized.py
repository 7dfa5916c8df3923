"""Engines with int8 linear layers: their detection and checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import VllmConfig

INT8 = "int8"
"""All linear layers except the head in int8: weights symmetric per channel, activations symmetric per token."""

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS}},
}


def quantization_of(config: VllmConfig) -> str | None:
    """Return `INT8` for an int8 checkpoint on a CPU; otherwise vLLM's name for the quantization, or None."""
    model = config.model_config
    given = getattr(model.hf_config, "quantization_config", None)
    is_known = model.quantization == "compressed-tensors" and isinstance(given, Mapping) and is_int8(given)
    return INT8 if is_known and config.device_config.device_type == "cpu" else model.quantization


def is_int8(config: Mapping[str, object]) -> bool:
    """Return whether a `quantization_config` is that of an int8 checkpoint ("W8A8" of compressed-tensors)."""
    groups = cast("Mapping[str, Mapping[str, Any]]", config.get("config_groups", {}))
    if len(groups) != 1 or any(config.get(name) != _CONFIG[name] for name in ("ignore", "format")):
        return False
    [group] = groups.values()
    weights, activations = (group.get(key) or {} for key in ("weights", "input_activations"))
    has_values = _WEIGHTS.items() <= weights.items() and _ACTIVATIONS.items() <= activations.items()
    return has_values and group.get("targets") == ["Linear"]


def to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight ([num_outputs, num_inputs]) to int8; return it and its scales ([num_outputs, 1] float32).

    Example:
        >>> rounded, scale = to_int8(torch.tensor([[0.5, -1.0, 0.0]]))
        >>> rounded.tolist(), (rounded * scale).round(decimals=2).tolist()
        ([[64, -127, 0]], [[0.5, -1.0, 0.0]])
    """
    weight = weight.float()
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (weight / scale).round().to(torch.int8), scale


def int8_layers(model: torch.nn.Module) -> set[str]:
    """Return the names of the layers that an int8 engine quantises: all linear layers except the head.

    Raises ValueError if the model has matrices outside linear layers and embeddings, such as experts or convolutions.

    Example:
        >>> int8_layers(torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 3)))
        {'1'}
    """
    get_head: Callable[[], torch.nn.Module | None] = getattr(model, "get_output_embeddings", lambda: None)
    head = get_head()
    layers = {name: layer for name, layer in model.named_modules() if ".lora_" not in name}
    linear = {name for name, layer in layers.items() if isinstance(layer, torch.nn.Linear) and layer is not head}
    outside = [layer for layer in layers.values() if isinstance(layer, torch.nn.Embedding) or id(layer) == id(head)]
    kept = {id(weight) for layer in outside for weight in layer.parameters()}
    for name, weight in model.named_parameters():
        is_linear = name.rpartition(".")[0] in linear or ".lora_" in name
        if weight.ndim > 1 and not is_linear and id(weight) not in kept:
            raise ValueError(
                f"engines in int8 take linear layers, and {name} is the matrix of another kind of layer: start the "
                "engines without quantization."
            )
    return linear


@contextmanager
def checkpoint_for(model: str, quantization: str | None, *, is_cpu: bool, takes_adapters: bool) -> Iterator[str]:
    """Yield the folder to start an engine from: `model`, or a temporary int8 copy.

    Raises ValueError if the quantization is unknown, is used on a GPU or with adapters, or cannot be applied.
    """
    if quantization is None:
        yield model
        return
    if quantization != INT8 or not is_cpu:
        raise ValueError(
            f"quantization must be {INT8!r}, for an engine on a CPU, or None: only vLLM's CPU kernels were tested; "
            f"got {quantization!r} on a {'CPU' if is_cpu else 'GPU'}."
        )
    if takes_adapters:
        raise ValueError(
            f"vLLM runs no adapters over layers in {INT8}: leave out quantization, or send merged weights."
        )
    with tempfile.TemporaryDirectory(prefix="llmrl-int8-") as folder:
        write_int8_checkpoint(model, Path(folder))
        yield folder


def write_int8_checkpoint(source: str | os.PathLike[str], target: Path) -> None:
    """Write an int8 checkpoint of the folder `source`, and copies of its other files, into an existing folder.

    One file is in memory at a time. Raises ValueError if `source` is not a checkpoint in
    safetensors files, is already quantised, lacks a weight, or has matrices in other layers.
    """
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    source = Path(source)
    files = sorted(source.glob("*.safetensors"))
    index = source / "model.safetensors.index.json"
    if index.is_file():
        indexed = set(json.loads(index.read_text())["weight_map"].values())
        files = [file for file in files if file.name in indexed]
    if not files or not (source / "config.json").is_file():
        raise ValueError(f"quantization={INT8!r} needs a folder with config.json and *.safetensors, got {source}.")
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"the checkpoint in {source} is quantised already: leave out quantization={INT8!r}.")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    rounded = {f"{name}.weight" for name in int8_layers(model)}
    missing = set(rounded)
    for file in files:
        weights = load_file(file)
        for name in rounded & weights.keys():
            weights[name], weights[f"{name}_scale"] = to_int8(weights[name])
        missing -= weights.keys()
        save_file(weights, target / file.name, metadata={"format": "pt"})
    if missing:
        raise ValueError(f"the checkpoint in {source} lacks the weight {sorted(missing)[0]} of the transformers model.")
    for path in source.iterdir():
        is_weights = path.suffix in (".safetensors", ".bin", ".pth") or path.name.endswith(".index.json")
        if path.is_file() and not is_weights:
            shutil.copyfile(path, target / path.name)
    (target / "config.json").write_text(json.dumps({**config, "quantization_config": _CONFIG}))
