"""`llmrl doctor --model`: whether a checkpoint can be trained and served, from its configuration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmrl._utils.model_parts import class_with_images, decoder_of, leave_out_encoders, text_config
from llmrl.cli.doctor import Check
from llmrl.trainer.model.decoder import PACKABLE_LAYERS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

DTYPES = ("float32", "bfloat16")


def examine_model(folder: Path) -> list[Check]:
    """Check a model's class, layers, weights, engine and template; its weights are not read.

    Raises OSError or ValueError if there is no configuration that transformers reads.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    try:
        model, left_out = _on_meta(config)
    except (ImportError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        return [Check("class", "wrong", f"{config.model_type}: {first}", "train another model, or install the package")]
    name = type(model).__name__
    without = f", {left_out / 1e6:.3g} M of encoders left out" if left_out else ""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return [
        Check("class", "good", f"{name}, {num_parameters / 1e9:.3g} B parameters trained{without}"),
        *_training(model),
        *_engine(model, name, config),
        _template(folder),
        _cost(folder, num_parameters),
        _adapters(model),  # last, since it adds them
    ]


def _on_meta(config: PreTrainedConfig) -> tuple[PreTrainedModel, int]:
    """Return the model without data, and the number of parameters that are left out."""
    from transformers import AutoModelForCausalLM

    kind = class_with_images(config)
    make = kind or AutoModelForCausalLM.from_config
    with torch.device("meta"):
        model = make(config)
    num_all = sum(parameter.numel() for parameter in model.parameters())
    if kind is not None:
        leave_out_encoders(model)
    return model, num_all - sum(parameter.numel() for parameter in model.parameters())


def _training(model: PreTrainedModel) -> Iterator[Check]:
    if not isinstance(model.get_output_embeddings(), torch.nn.Linear):
        yield Check("rows", "wrong", "its output head is not one linear layer", "train a causal language model")
        return
    others = sorted(set(getattr(text_config(model), "layer_types", None) or ()) - PACKABLE_LAYERS)
    if others:
        found = f"one row a bin, for layers of type {', '.join(others)}: prompts are computed once for each sample"
        yield Check("rows", "note", found, "docs/models.md says what that costs")
    else:
        yield Check("rows", "good", "packed, if the probe at the start of training finds that exact")
    if hasattr(decoder_of(model), "layers"):
        yield Check("shards", "good", "layer by layer")
    else:
        yield Check("shards", "note", "not possible: its decoder has no list of layers", "train it on one device")


def _engine(model: PreTrainedModel, name: str, config: PreTrainedConfig) -> Iterator[Check]:
    from llmrl.engines.vllm.model_types import exact_length_of, problem_of
    from llmrl.weight_sync.source import ModelWeights

    num_weights = len(ModelWeights(model).metadata())
    try:
        from llmrl.engines.vllm.private import ModelRegistry, current_platform
    except ImportError:
        yield Check("engine", "note", "vLLM is not installed", "make setup")
        return
    elsewhere = "train another model, or sample with TransformersEngine"
    if name not in ModelRegistry.get_supported_archs():
        yield Check("engine", "wrong", f"vLLM has no class {name}", elsewhere)
        return
    problems = {dtype: problem_of(config.to_dict(), dtype=dtype, is_cpu=current_platform.is_cpu()) for dtype in DTYPES}
    if all(problems.values()):
        yield Check("engine", "wrong", str(problems["bfloat16"]), elsewhere)
        return
    yield Check("engine", "good", f"vLLM has its class; {num_weights} weights are sent, and compared at the start")
    exact, reason = exact_length_of(config.to_dict())
    if exact < math.inf:
        yield Check("length", "note", f"up to {exact} tokens: {reason}", f"model.max_model_len={exact}")
    if refused := [dtype for dtype in DTYPES if problems[dtype]]:
        yield Check("dtype", "note", str(problems[refused[0]]))


def _adapters(model: PreTrainedModel) -> Check:
    """Add LoRA adapters as a run does, and check that the weights to send stay the same."""
    from llmrl.trainer.loading import LoRAConfig, add_adapters
    from llmrl.weight_sync import get_model_metadata

    expected = get_model_metadata(model)
    try:
        is_base = get_model_metadata(add_adapters(model, LoRAConfig(rank=2))) == expected
    except ImportError as error:
        return Check("adapters", "note", str(error).splitlines()[0])
    except (TypeError, ValueError) as error:
        advice = "name the layers of attention: model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        return Check("adapters", "note", f"not possible for all linear layers: {str(error).splitlines()[0]}", advice)
    if not is_base:
        return Check("adapters", "note", "not possible: merged weights have other names", "train all weights")
    return Check("adapters", "good", "of all linear layers (model.lora.rank), merged on the way to the engine")


def _cost(folder: Path, num_parameters: int) -> Check:
    """Return the memory that is always in use; `--plan` also counts activations, for dense models."""
    parts = {"weights, gradients and Adam": 16, "with adapters": 4, "engine in bfloat16": 2}
    found = ", ".join(f"{name} {size * num_parameters / 2**30:.3g} GiB" for name, size in parts.items())
    return Check("memory", "good", f"{found}; activations: llmrl doctor --plan {folder} hardware=gpu8")


def _template(folder: Path) -> Check:
    from llmrl.cli.models import make_chat_renderer
    from llmrl.rendering import TemplateRenderer

    try:
        renderer = make_chat_renderer(str(folder), None)
    except (ValueError, OSError, ImportError) as error:
        return Check("template", "note", str(error).splitlines()[0], "give model.chat_template")
    parser = renderer.tool_parser if isinstance(renderer, TemplateRenderer) else type(renderer).__name__
    return Check("template", "good", f"renders exactly; tool calls: {parser}")
