"""Models with which vLLM's engines cannot be trained, refused by their configuration before an engine starts."""

from __future__ import annotations

import contextlib
from typing import Any

from llmrl.engines.base import EngineError


def check_model(folder: str, *, dtype: str, is_cpu: bool) -> None:
    """Raise EngineError if an engine of the model in `folder` does not start, or does not take the trainer's weights.

    A model whose configuration cannot be read passes; vLLM says what is wrong with it.
    """
    from transformers import PreTrainedConfig

    with contextlib.suppress(OSError):
        config, _ = PreTrainedConfig.get_config_dict(folder)
        if problem := problem_of(config, dtype=dtype, is_cpu=is_cpu):
            raise EngineError(f"the model in {folder}: {problem}")


def problem_of(config: dict[str, Any], *, dtype: str, is_cpu: bool) -> str | None:
    """Return why an engine of a model's configuration (`config.json`) is refused; None if it is not.

    Example:
        >>> qwen = {"text_config": {"linear_num_value_heads": 4}}
        >>> problem_of(qwen, dtype="bfloat16", is_cpu=True)
        >>> problem_of(qwen, dtype="float32", is_cpu=True)
        "vLLM's kernels of gated delta rules on a CPU compute in bfloat16 alone, got float32: set dtype='bfloat16' ..."
    """
    text = config.get("text_config") or config
    if is_cpu and "linear_num_value_heads" in text and dtype not in ("bfloat16", "torch.bfloat16"):
        return (
            f"vLLM's kernels of gated delta rules on a CPU compute in bfloat16 alone, got {dtype}: set "
            "dtype='bfloat16' (model.dtype=bfloat16 of a script) for trainer and engine."
        )
    return None
