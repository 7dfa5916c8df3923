"""The parts of a transformers model that the trainer needs: decoder, output head and logit transform."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from typing import TYPE_CHECKING

import torch

from llmrl._utils.model_parts import decoder_of, set_attention, text_config, without_adapters
from llmrl.engines.transformers.expert_routers import Routers
from llmrl.trainer.head.log_probs import Head, LogitTransform, compute_dtype_of
from llmrl.trainer.head.output_head import OutputHead
from llmrl.trainer.model.checkpointing import set_scoring_mode
from llmrl.trainer.model.decoder import (
    can_be_split,
    context_ranks_of,
    decoder_hidden_states,
    num_attention_layers,
    own_experts,
)
from llmrl.trainer.model.exactness import ExactnessProbe
from llmrl.trainer.model.long_rope import use_long_frequencies
from llmrl.trainer.model.routing import RoutingCounts
from llmrl.trainer.packing.attention import register_packed_attention
from llmrl.trainer.packing.branches import compute_in_branches
from llmrl.trainer.packing.masks import FUSED_DEVICES, IMPLEMENTATION
from llmrl.trainer.packing.packed_rows import PackedRows
from llmrl.trainer.trained_model import trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_NUM_COMPILED = 32
"""Maximum number of compiled variants per layer."""


class CausalModel:
    """The parts of a causal language model: hidden states of packed rows, output head and logit transform.

    Rows are computed in the first of these ways that reproduces the logits of `eager` attention on one row at a time
    (`ExactnessProbe`): packed with the configured attention, packed with `eager`, or one row per bin without a mask.

    Raises:
        TypeError: if the output head is not linear, the logits computed from the parts differ from the model's, peft
            computes more than the adapted model (prompt and prefix tuning), or if no way of computing rows is exact.
    """

    def __init__(self, model: PreTrainedModel, *, temperature: float = 1.0) -> None:
        self.model = without_adapters(model)
        self.config = text_config(self.model)
        self.head = OutputHead(self.model.get_output_embeddings())
        set_scoring_mode(self.model)
        compute_in_branches(decoder_of(self.model))
        probe = ExactnessProbe(self.model, self.head)
        if self.model is not model:
            probe.check_adapted(model)
            set_scoring_mode(self.model)
        self.transform: LogitTransform = dataclasses.replace(probe.transform, temperature=temperature)
        """The model's transform of its logits, followed by the temperature."""
        self.is_packed = True
        """Whether rows are packed. If False, each row has its own bin and no mask."""
        self.faults: dict[str, str] = {}
        """Rejected ways of computing rows, and the reason for each."""
        self._is_offloading = self._is_compiled = self._is_long = False
        self.routers = Routers(self.model)
        """Expert routers; empty if the model is not a mixture of experts."""
        self._choose_computation(probe)
        self._check_context()
        self.attention_length = self._attention_length()
        """Bin length, in tokens, at which attention costs as much as the rest of the model."""

    @property
    def decoder(self) -> torch.nn.Module:
        """The model without its head."""
        return decoder_of(self.model)

    @property
    def is_checkpointing(self) -> bool:
        """Whether gradient checkpointing is on."""
        return getattr(self.model, "is_gradient_checkpointing", False)

    def offload_activations(self, *, offload: bool) -> None:
        """Set whether checkpointed activations are in host memory; raise ValueError without gradient checkpointing."""
        if offload and not self.is_checkpointing:
            raise ValueError(
                "offload_activations=True needs gradient checkpointing (model.gradient_checkpointing_enable()): "
                "without it, all activations of a layer, and its weights, would go to the host."
            )
        self._is_offloading = offload

    def compile_layers(self) -> None:
        """Compile each layer in place, once for all row lengths; raise TypeError if there is no list of layers."""
        layers = getattr(self.decoder, "layers", None)
        if layers is None:
            raise TypeError(f"{type(self.decoder).__name__} has no list `layers`; leave compile_layers out.")
        self._is_compiled = True
        # The limit must cover the kinds of layers, each with and without gradients, for one bin and for several.
        for layer in layers:
            layer.compile(dynamic=True, recompile_limit=_NUM_COMPILED)

    def packed_head(self, packed: PackedRows, sharded_dtype: torch.dtype | None) -> tuple[Head, torch.Tensor]:
        """Return the head at the predicting positions, and each scored token's index into them, `[num_scored]`."""
        hidden = self.hidden_states(packed).flatten(0, 1)
        weight = self.head.weight(sharded_dtype)
        predictors, positions = torch.unique_consecutive(packed.predictors, return_inverse=True)
        states = hidden[predictors]
        return Head(states, weight, self.head.bias(), self.transform, compute_dtype_of(states, weight)), positions

    def hidden_states(self, packed: PackedRows) -> torch.Tensor:
        """Return the last hidden states `[num_bins, bin_length, hidden_size]`.

        Raises ValueError if a row is so long that rotary frequencies depend on its length, or if
        compiled layers would have to replay experts.
        """
        if packed.routed_experts is not None and self._is_compiled:
            raise ValueError(
                "compile_layers=True cannot replay the experts of rows: set it to False, or drop 'routed_experts' from "
                "the rows."
            )
        set_scoring_mode(self.model)
        self._check_context()
        limit = self._position_limit()
        if limit is not None and int(packed.position_ids.max()) >= limit:
            raise ValueError(
                f"A row has {int(packed.position_ids.max()) + 1} tokens, but the rotary embedding of "
                f"{type(self.model).__name__} changes beyond {limit} tokens with the longest row of the micro-batch, "
                "so log-probs of a row would depend on the others: limit the length of rollouts, connect an engine "
                "with a larger max_model_len before training ('longrope'), or set another rope_type."
            )
        with contextlib.ExitStack() as context:
            if self._is_offloading and torch.is_grad_enabled():
                context.enter_context(torch.autograd.graph.save_on_cpu(pin_memory=self.head.device.type == "cuda"))
            if not self.routers.num_layers or self._is_compiled or not torch.is_grad_enabled():
                return decoder_hidden_states(self.model, packed, is_packed=self.is_packed)
            choices = context.enter_context(self.routers.telling())
            hidden = decoder_hidden_states(self.model, packed, is_packed=self.is_packed)
        if packed.routed_experts is not None:
            self.routers.check_told(choices)
        elif len(choices) != self.routers.num_layers:
            return hidden
        record = trained_model(self.model)
        experts = own_experts(self.model, packed)
        counts = RoutingCounts.of(choices, self.routers.num_experts, self._counted(packed), experts)
        record.routing = counts if record.routing is None else record.routing + counts
        return hidden

    def _counted(self, packed: PackedRows) -> torch.Tensor:
        """Return the positions at which this rank counts experts, among those that it computes."""
        positions = packed.token_positions.unique()
        ranks = context_ranks_of(self.model, packed.input_ids.shape[1])
        if ranks is not None:
            return ranks.positions_of(positions, packed.input_ids.shape[1])
        return positions if trained_model(self.model).is_reporting else positions[:0]

    def _check_context(self) -> None:
        if trained_model(self.model).context is None:
            return
        if not (self.is_packed and can_be_split(self.model)):
            raise TypeError(
                f"Rows of {type(self.model).__name__} cannot be split over ranks: layers other than packed attention "
                "combine tokens, or attention is not packed. Use context_ranks=1."
            )

    def _position_limit(self) -> int | None:
        """Return the length beyond which frequencies change; first adopt the engine's frequencies if these are long."""
        limit = _position_limit(self.config)
        length = trained_model(self.model).engine_length
        if limit is not None and not self._is_long and length is not None and length > limit:
            self._is_long = use_long_frequencies(self.model)
        return None if self._is_long else limit

    def _attention_length(self) -> float:
        """Estimate `attention_length` by operations: 2 per token and weight, 4 per query, key and hidden unit."""
        is_fused = self.config._attn_implementation == IMPLEMENTATION and self.head.device.type in FUSED_DEVICES
        if is_fused or not getattr(self.config, "num_hidden_layers", None):
            return math.inf
        width = getattr(self.config, "hidden_size", None)
        num_layers = num_attention_layers(self.config)
        if not width or not num_layers:
            return math.inf
        num_weights = sum(parameter.numel() for parameter in self.decoder.parameters() if parameter.ndim > 1)
        num_weights -= self.model.get_input_embeddings().weight.numel()
        return max(1.0, num_weights / (2 * width * num_layers))

    def _is_replaced(self, chosen: str) -> bool:
        """Return whether packed attention may replace `chosen`; it replaces `eager` only in models without `sdpa`."""
        is_fused = self.head.device.type in FUSED_DEVICES
        if chosen == "eager":
            return is_fused and not getattr(self.model, "_supports_sdpa", True)
        return chosen in ("sdpa", "flex_attention") or (is_fused and "flash" in chosen)

    def _choose_computation(self, probe: ExactnessProbe) -> None:
        """Choose the first exact way of computing rows; warn about a fallback, raise TypeError if none is exact."""
        name = type(self.model).__name__
        chosen = self.config._attn_implementation
        register_packed_attention()
        preferred = IMPLEMENTATION if self._is_replaced(chosen) else chosen
        faults = self.faults
        packings = [True, False]
        if (packing_fault := probe.packing_fault()) is not None:
            faults["packed"] = packing_fault
            packings = [False]
        ways = [(is_packed, one) for is_packed in packings for one in dict.fromkeys((preferred, chosen, "eager"))]
        if "flash" in chosen:  # try eager last: its memory is quadratic in the length of rows
            ways.sort(key=lambda way: way[1] == "eager")
        for is_packed, implementation in ways:
            fault = probe.fault(implementation, is_packed=is_packed)
            if fault is None:
                set_attention(self.model, implementation)
                self.is_packed = is_packed
                why = "; ".join(dict.fromkeys(faults.values()))
                if not is_packed:
                    _say_once(
                        f"{name}: rows cannot be packed ({why}). Each row is computed by itself, which is exact, but "
                        "shared prefixes are computed once per row, and short rows are padded."
                    )
                elif implementation not in (preferred, chosen):
                    _say_once(
                        f"{name}: attn_implementation={chosen!r} differs from 'eager' ({why}); 'eager' is "
                        "used, which stores [length, length] weights for every layer and head."
                    )
                return
            faults[f"{'packed' if is_packed else 'one row a bin'}, {implementation}"] = fault
        hint = ""
        if self.is_checkpointing:
            hint = (
                ". Gradient checkpointing is on, which puts some models in training mode: try without it "
                "(train.gradient_checkpointing=false), or set what is active only in that mode, such as dropout, to 0"
            )
        raise TypeError(
            f"{name} cannot be trained exactly; compared with 'eager', one row at a time: "
            + "; ".join(f"{way}: {fault}" for way, fault in faults.items())
            + f"{hint}."
        )


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Return the length beyond which rotary frequencies depend on the longest row of a forward pass, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    limits = [
        parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        for parameters in [rope, *rope.values()]
        if isinstance(parameters, dict) and parameters.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
