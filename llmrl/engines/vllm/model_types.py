"""Models with which vLLM's engines cannot be trained, refused by their configuration before an engine starts."""

from __future__ import annotations

import contextlib
from typing import Any

from llmrl.engines.base import EngineError

# Class that a checkpoint names -> what vLLM's CPU build does not compute.
_NOT_ON_CPU = {
    "DeepseekV32ForCausalLM": "sparse attention",
    "DeepseekV4ForCausalLM": "sparse attention",
    "GlmMoeDsaForCausalLM": "sparse attention",
    "HYV4ForCausalLM": "sparse attention",
    "KimiLinearForCausalLM": "latent attention beside layers with a state",
    "NemotronHForCausalLM": "experts without a gate",
    "OlmoHybridForCausalLM": "delta rules of this family",
    "Qwen4ExpForCausalLM": "attention with an index",
    "Qwen4ExpForConditionalGeneration": "attention with an index",
}
# Classes of vLLM that did not take the weights of a random checkpoint; `docs/models.md` has each reason.
_NOT_TAKEN = frozenset(
    {
        "DbrxForCausalLM", "Emu3ForConditionalGeneration", "FalconForCausalLM", "InklingForCausalLM",
        "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration", "LagunaForCausalLM",
        "LongcatFlashForCausalLM", "Zamba2ForCausalLM",
    }
)  # fmt: skip


def check_model(folder: str, *, dtype: str, is_cpu: bool, is_updated: bool) -> None:
    """Raise EngineError if an engine of the model in `folder` does not start, or takes no updates and `is_updated`.

    A model without a readable configuration passes; vLLM says what is wrong with it.
    """
    from transformers import PreTrainedConfig

    with contextlib.suppress(OSError):
        config, _ = PreTrainedConfig.get_config_dict(folder)
        if problem := problem_of(config, dtype=dtype, is_cpu=is_cpu, is_updated=is_updated):
            raise EngineError(f"the model in {folder}: {problem}")


def problem_of(config: dict[str, Any], *, dtype: str, is_cpu: bool, is_updated: bool = True) -> str | None:
    """Return why an engine of a model's configuration (`config.json`) is refused; None if it is not.

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
    missing = _NOT_ON_CPU.get(names[0])
    if names[0] == "NemotronHForCausalLM" and "moe" not in (text.get("layers_block_type") or ()):
        missing = None  # it is dense
    if is_cpu and missing:
        return f"vLLM's CPU build does not compute the {missing} of {names[0]}: it needs a GPU."
    if is_cpu and "linear_num_value_heads" in text and dtype not in ("bfloat16", "torch.bfloat16"):
        return (
            f"vLLM's kernels of gated delta rules on a CPU compute in bfloat16 alone, got {dtype}: set "
            "dtype='bfloat16' (model.dtype=bfloat16 of a script) for trainer and engine."
        )
    return None
