"""Estimate of the device memory that training needs, from the model's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrl.trainer.head.log_probs import default_chunk_size
from llmrl.trainer.optimizer import MOMENT_BYTES, MomentsName

_QUANTIZED = 0.5 + 4 / 64
"""Bytes of a 4-bit weight, with a scale of 4 bytes for 64 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a dense transformer with gated feed-forward layers (Llama, Qwen)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    num_heads: int = 1
    """Number of query heads."""
    query_size: int
    """Total size of all query heads."""
    key_size: int
    """Total size of all key heads, equal to that of all value heads."""
    is_tied: bool

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """Read the shape from `config.json` in a folder; raise ValueError if the model is not dense."""
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        is_tied = _is_tied(folder, config)
        config = config.get("text_config") or config
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in needed if not isinstance(config.get(name), int)]
        experts = [name for name in config if "expert" in name and config[name]]
        if missing or experts:
            raise ValueError(
                f"{folder}: memory can be planned only for dense transformers, but config.json has "
                + (f"no {', '.join(missing)}." if missing else f"{', '.join(experts)}.")
            )
        heads = config["num_attention_heads"]
        hidden = config["hidden_size"]
        head = config.get("head_dim") or hidden // heads
        return cls(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            vocab_size=config["vocab_size"],
            num_heads=heads,
            query_size=heads * head,
            key_size=(config.get("num_key_value_heads") or heads) * head,
            is_tied=is_tied,
        )

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one layer, without biases and norms."""
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size + 3 * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Number of parameters of the output head, equal to that of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return self.num_layers * self.layer_parameters + self.head_parameters * (1 if self.is_tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of all linear layers except the head."""
        hidden = self.hidden_size
        queries = self.query_size
        keys = self.key_size
        wide = self.intermediate_size
        return self.num_layers * rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + wide))


def _is_tied(folder: str | Path, config: Mapping[str, object]) -> bool:
    """Return whether the head is the embedding. transformers reads the outer configuration, not that of its text."""
    if "tie_word_embeddings" in config:
        return bool(config["tie_word_embeddings"])
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except ValueError:  # transformers does not know the model type
        text = config.get("text_config")
        return isinstance(text, Mapping) and bool(text.get("tie_word_embeddings", False))
    return bool(getattr(whole, "tie_word_embeddings", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """Training options that affect memory."""

    num_ranks: int = 1
    """Number of devices over which the model is sharded."""
    context_ranks: int = 1
    """Number of devices that compute a row together."""
    token_budget: int = 8192
    """Tokens of a micro-batch."""
    bin_length: int = 2048
    """Tokens per bin; at least the longest row."""
    longest_row: int = 0
    """Tokens of the longest row; 0 if unknown."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """Whether activations kept by checkpointing are stored in host memory."""
    is_half: bool = True
    """Whether to compute in bfloat16 or float16 over float32 weights."""
    lora_rank: int | None = None
    quantize_base: bool = False
    """Whether the weights of layers are quantized to 4 bits."""
    moments: MomentsName = "float32"
    has_reference: bool = False
    """Whether the loss has a KL to the initial model; with adapters, this needs no second copy of the weights."""
    num_teacher_parameters: int = 0
    """Number of parameters of a teacher that is loaded beside the model."""
    is_gpu: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes per device, by part."""

    lasting: dict[str, int] = field(default_factory=dict)
    """Allocated throughout training: `weights` (of which each rank reads its own part), `gradients`, `optimizer`,
    `reference`, `teacher`."""
    passing: dict[str, int] = field(default_factory=dict)
    """Allocated during a micro-batch: `activations`, `gathered` (weights cast or gathered), `head`, `mask`."""

    @property
    def total(self) -> int:
        """Peak memory."""
        return sum(self.lasting.values()) + sum(self.passing.values())


def plan_memory(model: ModelShape, training: TrainingShape) -> MemoryPlan:
    """Estimate the memory of each device of a trainer; a test compares the estimates with measurements.

    In float32, each layer keeps for each token 8 numbers per hidden unit, 5.5 per unit of the queries, 4.5 per unit of
    the keys and 5 per unit of the feed-forward layer. Under autocast, residuals and norms stay in float32.

    Example:
        >>> small = ModelShape(hidden_size=896, intermediate_size=4864, num_layers=24, vocab_size=151936,
        ...                    query_size=896, key_size=128, is_tied=True)
        >>> plan = plan_memory(small, TrainingShape(num_ranks=2))
        >>> plan.lasting["optimizer"] == 8 * small.num_parameters // 2
        True
    """
    parameters = model.num_parameters
    trained = parameters
    weights = parameters
    if training.lora_rank is not None:
        trained = model.adapter_parameters(training.lora_rank)
        weights = parameters + trained
    base = 4 * weights
    if training.quantize_base:
        base -= int(model.num_layers * model.layer_parameters * (4 - _QUANTIZED))
    ranks = training.num_ranks
    # float32: 4 bytes per weight and 4 per gradient, sharded over ranks; the two moments have 4 bytes or 1 each.
    moments = trained * MOMENT_BYTES[training.moments]
    lasting = {"weights": base // ranks, "gradients": 4 * trained // ranks, "optimizer": moments // ranks}
    if training.has_reference and training.lora_rank is None:  # with adapters, the reference is the model without them
        lasting["reference"] = 4 * parameters // ranks
    if training.num_teacher_parameters:
        lasting["teacher"] = 4 * training.num_teacher_parameters // ranks
    passing = {
        "activations": _activations(model, training),
        "gathered": _gathered(model, training),
        "head": _head(model, training),
        "mask": 0,  # on GPU a block mask, or none
    }
    if not training.is_gpu:
        passing["mask"] = _num_tokens(training) * training.bin_length
    return MemoryPlan(lasting, passing)


def _num_tokens(training: TrainingShape) -> int:
    return max(training.token_budget, training.longest_row)


def _activations(model: ModelShape, training: TrainingShape) -> int:
    tokens = -(-_num_tokens(training) // training.context_ranks)
    hidden = model.hidden_size
    queries = model.query_size
    keys = model.key_size
    wide = model.intermediate_size
    layer = tokens * 4 * (8 * hidden + 5.5 * queries + 4.5 * keys + 5 * wide)
    if training.is_half:
        layer = tokens * (30 * hidden + 11 * queries + 9 * keys + 10 * wide)
    ends = 16 * _num_tokens(training) * hidden  # embedding, last norm and input of the head, not split over ranks
    if not training.gradient_checkpointing:
        return int(layer * model.num_layers + ends)
    # Each layer's input, and one recomputed layer.
    num_inputs = model.num_layers
    if training.offload_activations:
        num_inputs = 2  # one is fetched while another is used
    return int(4 * tokens * hidden * num_inputs + layer + ends)


def _gathered(model: ModelShape, training: TrainingShape) -> int:
    """Return the bytes of additional copies of layer weights: cast, or gathered from other ranks."""
    layer = model.layer_parameters
    if training.quantize_base:  # one matrix at a time, in float32 and cast
        return 6 * model.hidden_size * model.intermediate_size
    if training.num_ranks > 1:
        # The current layer, the prefetched next one, and the gradient before it is scattered.
        return layer * (2 * _weight_size(training) + 4)
    if not training.is_half:
        return 0
    # Cast copies needed by the backward pass; with checkpointing only those of the recomputed layer.
    if training.gradient_checkpointing:
        return 2 * layer
    return 2 * layer * model.num_layers


def _head(model: ModelShape, training: TrainingShape) -> int:
    """Return the bytes of the output head besides its weights: a copy, its gradient, and two chunks of logits."""
    num_bytes = 0
    if training.num_ranks > 1 or training.is_half:
        num_bytes += _weight_size(training) * model.head_parameters
    if training.lora_rank is None:
        num_bytes += 4 * model.head_parameters
    positions = default_chunk_size(model.vocab_size, is_gpu=training.is_gpu)
    if training.is_gpu:
        positions = min(positions, _num_tokens(training))
    return num_bytes + 2 * 4 * model.vocab_size * positions


def _weight_size(training: TrainingShape) -> int:
    return 2 if training.is_half else 4


def what_fits(model: ModelShape, training: TrainingShape, num_bytes: int) -> list[str]:
    """Return alternative changes of options, each the smallest of its kind, so that training fits into `num_bytes`."""
    found = []
    for kind in _changes(training):
        for entries, changed in kind:
            if plan_memory(model, changed).total <= num_bytes:
                found.append(entries)
                break
    return found


def _changes(training: TrainingShape) -> Iterator[Iterator[tuple[str, TrainingShape]]]:
    """Yield the changes of each kind, from the smallest to the largest."""
    least = max(512, training.longest_row)  # a budget below the longest row has no effect
    budgets = [training.token_budget >> halved for halved in range(1, 8) if training.token_budget >> halved >= least]
    yield ((f"train.token_budget={budget}", replace(training, token_budget=budget)) for budget in budgets)
    smallest = replace(training, gradient_checkpointing=True)
    yield (
        (f"train.gradient_checkpointing=true train.token_budget={budget}", replace(smallest, token_budget=budget))
        for budget in [training.token_budget, *budgets]
        if not training.gradient_checkpointing
    )
    budget = min([training.token_budget, *budgets])
    smallest = replace(smallest, token_budget=budget)
    also = f" train.gradient_checkpointing=true train.token_budget={budget}"
    if not training.offload_activations:
        yield iter([(f"train.offload_activations=true{also}", replace(smallest, offload_activations=True))])
    is_for_one_rank = training.quantize_base or training.moments == "8bit"
    yield (
        (f"train.num_ranks={ranks}{also}", replace(smallest, num_ranks=ranks))
        for ranks in (2, 4, 8, 16, 32)
        if ranks > training.num_ranks and ranks % training.context_ranks == 0 and not is_for_one_rank
    )
    yield ((f"model.lora.rank=16{also}", replace(smallest, lora_rank=16)) for _ in range(training.lora_rank is None))
