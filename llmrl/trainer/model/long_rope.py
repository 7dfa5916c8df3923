"""Rotary embeddings with two sets of frequencies (LongRoPE); an engine uses one set for all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl._utils.model_parts import decoder_of, text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def use_long_frequencies(model: PreTrainedModel) -> bool:
    """Make LongRoPE embeddings use their long frequencies for rows of every length.

    Returns whether all rotary embeddings of the model are of that type; otherwise nothing is changed. For rows up to
    the original length, transformers uses the short frequencies, but vLLM only if `max_model_len` does not exceed it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = [module for module in decoder_of(model).modules() if hasattr(module, "rope_type")]
    if not found or any(module.rope_type != "longrope" for module in found):
        return False
    for module in found:
        original = text_config(model).rope_parameters["original_max_position_embeddings"]
        device = module.original_inv_freq.device
        # transformers copies these frequencies for short rows.
        module.original_inv_freq, _ = ROPE_INIT_FUNCTIONS["longrope"](text_config(model), device, seq_len=original + 1)
    return True
