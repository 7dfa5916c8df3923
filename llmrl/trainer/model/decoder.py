"""The decoder of a transformers model, called with packed rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from llmrl._utils.model_parts import decoder_of, text_config
from llmrl.engines.transformers.expert_routers import ROUTED_EXPERTS
from llmrl.trainer.context import ContextRanks
from llmrl.trainer.packing.branches import BRANCHES, SHORTEST_SEGMENT, Branches
from llmrl.trainer.packing.masks import IMPLEMENTATION, Mask, packed_mask
from llmrl.trainer.packing.packed_rows import PackedRows
from llmrl.trainer.trained_model import trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_WITH_STATE = frozenset({"linear_attention", "conv"})
_TOKENWISE = frozenset({"mlp", "moe"})
PACKABLE_LAYERS = _ATTENTION | _WITH_STATE | _TOKENWISE
"""Types of layers that can compute packed rows; `ExactnessProbe` tests whether a model's layers do so exactly."""


def num_attention_layers(config: PreTrainedConfig) -> int:
    """Return the number of a decoder's layers with attention; layers of unknown types are counted."""
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return sum(one not in _WITH_STATE | _TOKENWISE for one in types)


def can_be_split(model: PreTrainedModel) -> bool:
    """Return whether each rank may compute a part of a row's tokens: only packed attention may combine tokens."""
    config = text_config(model)
    layer_types = set(getattr(config, "layer_types", None) or ())
    return config._attn_implementation == IMPLEMENTATION and not _WITH_STATE & layer_types


def context_ranks_of(model: PreTrainedModel, length: int) -> ContextRanks | None:
    """Return the ranks that split bins of this length; None if each rank computes whole bins, as for short bins."""
    ranks = trained_model(model).context
    # Attention recognises a part by its length, so a part must be shorter than its bin.
    if ranks is None or length < 2 * ranks.size or not can_be_split(model):
        return None
    return ranks


def own_experts(model: PreTrainedModel, packed: PackedRows) -> torch.Tensor | None:
    """Return `packed.routed_experts` at the positions that this rank computes."""
    ranks = context_ranks_of(model, packed.input_ids.shape[1])
    if ranks is None or packed.routed_experts is None:
        return packed.routed_experts
    return ranks.part_of(packed.routed_experts.unflatten(0, packed.input_ids.shape), fill=-1).flatten(0, 1)


def decoder_hidden_states(
    model: PreTrainedModel, packed: PackedRows, *, is_packed: bool, shortest_segment: int = SHORTEST_SEGMENT
) -> torch.Tensor:
    """Return the last hidden states `[num_bins, bin_length, hidden_size]` of a transformers model's decoder.

    If `is_packed` is False, `packed` must have one row per bin, and the model computes its own mask
    and positions; bins are padded on the right, where no token attends to the padding.
    """
    decoder = decoder_of(model)
    inputs: dict[str, object] = {"input_ids": packed.input_ids, "use_cache": False}
    experts = own_experts(model, packed)
    if experts is not None:
        inputs[ROUTED_EXPERTS] = experts
    if not is_packed:
        return decoder(**inputs).last_hidden_state
    config = text_config(model)
    dtype = next(model.parameters()).dtype
    device_type = packed.input_ids.device.type
    if config._attn_implementation == IMPLEMENTATION and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    mask = functools.partial(packed_mask, packed, implementation=config._attn_implementation, dtype=dtype)
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    layer_types = set(getattr(config, "layer_types", None) or ())
    attention_mask: Mask | dict[str, Mask | Branches]
    if layer_types & _WITH_STATE:
        branches = Branches.of(packed, shortest=shortest_segment)
        if not layer_types & _ATTENTION:
            return decoder(**inputs | {BRANCHES: branches}).last_hidden_state
        attention_mask = dict.fromkeys(layer_types - _ATTENTION, branches)
        attention_mask |= {name: mask(window=windows[name]) for name in layer_types & _ATTENTION}
    elif "sliding_attention" in layer_types:
        attention_mask = {name: mask(window=window) for name, window in windows.items()}
    elif layer_types:
        attention_mask = mask()
    else:  # without `layer_types`, a configured window applies to every layer (Mistral)
        attention_mask = mask(window=windows["sliding_attention"])
    length = packed.input_ids.shape[1]
    ranks = context_ranks_of(model, length)
    inputs |= {"position_ids": packed.position_ids, "attention_mask": attention_mask}
    if ranks is None:
        return decoder(**inputs).last_hidden_state
    inputs |= {"input_ids": ranks.part_of(packed.input_ids), "position_ids": ranks.part_of(packed.position_ids)}
    return ranks.whole(decoder(**inputs).last_hidden_state, length)
