"""Checks of a model's configuration before an engine starts, and the size of its key-value cache."""

from __future__ import annotations

import math
from typing import Any

from llmrl.engines.base import EngineError

Config = dict[str, Any]
"""Content of `config.json`."""

# Class that a checkpoint names -> operation that vLLM's CPU build does not compute.
_NOT_ON_CPU = {
    "DeepseekV32ForCausalLM": "sparse attention",
    "DeepseekV4ForCausalLM": "sparse attention",
    "FalconMambaForCausalLM": "scan of Mamba-1",
    "GlmMoeDsaForCausalLM": "sparse attention",
    "HYV4ForCausalLM": "sparse attention",
    "JambaForCausalLM": "scan of Mamba-1",
    "KimiLinearForCausalLM": "latent attention beside layers with a state",
    "MambaForCausalLM": "scan of Mamba-1",
    "MiniMaxM2ForCausalLM": "experts that a sigmoid selects",
    "NemotronHForCausalLM": "experts without a gate",
    "OlmoHybridForCausalLM": "delta rules of this family",
    "Qwen4ExpForCausalLM": "attention with an index",
    "Qwen4ExpForConditionalGeneration": "attention with an index",
}
# Classes of vLLM that did not take the weights of a random checkpoint; `docs/models.md` has each reason.
_NOT_TAKEN = frozenset(
    {
        "AXK1ForCausalLM", "DbrxForCausalLM", "Emu3ForConditionalGeneration", "InklingForCausalLM",
        "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "LagunaForCausalLM",
        "LongcatFlashForCausalLM", "Zamba2ForCausalLM",
    }
)  # fmt: skip
# Classes that vLLM computes differently from transformers, with the difference.
_OTHERWISE = {
    "HrmTextForCausalLM": "lets the tokens of a prompt see what follows them, unlike the trainer",
    "Gemma3nForCausalLM": "has log-probs that were off by 1 nat in tiny random form",
    "Gemma3nForConditionalGeneration": "has log-probs that were off by 1 nat in tiny random form",
    "MiMoV2FlashForCausalLM": "has log-probs that were off by 6 nats in tiny random form",
}

_PLAIN_CACHES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types with keys and values of one size in all layers."""


def check_model(
    folder: str, max_model_len: int | None, *, dtype: str, is_cpu: bool, is_updated: bool, is_drafting: bool = False
) -> None:
    """Raise EngineError if vLLM cannot run the model in `folder` as requested.

    With `is_updated`, vLLM must take updates and compute the log-probs of transformers. With `is_drafting` on a CPU,
    the model must not have layers with a state. A model without a readable configuration passes; vLLM refuses it.
    """
    config = read_config(folder)
    if problem := problem_of(config, dtype=dtype, is_cpu=is_cpu, is_updated=is_updated):
        raise EngineError(f"the model in {folder}: {problem}")
    exact, reason = exact_length_of(config)
    text = config.get("text_config") or config
    if is_drafting and is_cpu and _has_state(text):
        raise EngineError(
            f"the model in {folder} has layers with a state, for which vLLM's CPU build cannot draft: leave "
            "speculative out."
        )
    longest = max_model_len or text.get("max_position_embeddings") or exact
    # Beyond 32,768 vLLM scales Llama 4's attention as transformers does.
    if is_updated and exact < longest and not ("llama4" in text.get("model_type", "") and longest > 1 << 15):
        raise EngineError(
            f"the model in {folder}: {reason}, and log-probs of longer rows differ: set max_model_len={exact} "
            f"or less, got {longest}."
        )


def read_config(model: str) -> Config:
    """Return the configuration of a model in a folder or on a hub; an empty dict if it cannot be read."""
    from transformers import PreTrainedConfig

    try:
        config, _ = PreTrainedConfig.get_config_dict(model)
    except OSError:
        return {}
    return dict(config)


def key_value_bytes(config: Config, dtype: str) -> int | None:
    """Return the bytes of a token's keys and values; None if the model type or the dtype is not a known one.

    Example:
        >>> sizes = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
        >>> key_value_bytes({"model_type": "llama", **sizes}, "float32")
        46080
    """
    import torch

    text = config.get("text_config") or config
    size = getattr(torch, dtype, None)
    if text.get("model_type") not in _PLAIN_CACHES or not isinstance(size, torch.dtype):
        return None
    num_heads = text["num_attention_heads"]
    num_pairs = text["num_hidden_layers"] * (text.get("num_key_value_heads") or num_heads)
    head_size = text.get("head_dim") or text["hidden_size"] // num_heads
    return int(2 * num_pairs * head_size * size.itemsize)


def _has_state(text: Config) -> bool:
    layer_types = text.get("layer_types") or ()
    return not {"linear_attention", "conv", "mamba"}.isdisjoint(layer_types) or any("mamba" in name for name in text)


def exact_length_of(config: Config) -> tuple[float, str]:
    """Return the length up to which vLLM computes the same as transformers, and the reason for the limit.

    Example:
        >>> exact_length_of({"model_type": "cohere2", "sliding_window": 4096})[0]
        4096
        >>> exact_length_of({"model_type": "llama"})
        (inf, '')
    """
    text = config.get("text_config") or config
    kind = text.get("model_type")
    if kind in ("cohere2", "cohere2_moe") and text.get("sliding_window"):
        return text["sliding_window"], "vLLM's windows are one token longer than transformers'"
    if kind == "llama4_text" and text.get("attn_temperature_tuning"):
        length = text.get("floor_scale", 8192)
        return length, "vLLM does not scale attention by position unless max_model_len is above 32768"
    return math.inf, ""


def problem_of(config: Config, *, dtype: str, is_cpu: bool, is_updated: bool = True) -> str | None:
    """Return the reason why an engine of a model's configuration (`config.json`) is refused, or None.

    Example:
        >>> qwen = {"text_config": {"linear_num_value_heads": 4}}
        >>> problem_of(qwen, dtype="bfloat16", is_cpu=True)
        >>> problem_of(qwen, dtype="float32", is_cpu=True)
        "vLLM's kernels of gated delta rules on a CPU compute in bfloat16 alone, got float32: set dtype='bfloat16' ..."
    """
    text = config.get("text_config") or config
    names = config.get("architectures") or [""]
    if is_updated and names[0] in _NOT_TAKEN:
        return f"vLLM's class {names[0]} does not take the trainer's weights: train with TransformersEngine."
    if is_updated and names[0] in _OTHERWISE:
        return f"vLLM's class {names[0]} {_OTHERWISE[names[0]]}: train with TransformersEngine."
    missing = _NOT_ON_CPU.get(names[0])
    if names[0] == "NemotronHForCausalLM" and "moe" not in (text.get("layers_block_type") or ()):
        missing = None  # the model is dense
    if is_cpu and missing:
        return f"vLLM's CPU build does not compute the {missing} of {names[0]}: it needs a GPU."
    if is_cpu and "linear_num_value_heads" in text and dtype not in ("bfloat16", "torch.bfloat16"):
        return (
            f"vLLM's kernels of gated delta rules on a CPU compute in bfloat16 alone, got {dtype}: set "
            "dtype='bfloat16' (model.dtype=bfloat16 of a script) for trainer and engine."
        )
    return None
