"""What training a model takes of a device's memory, by parts, from its shape alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrl.trainer.head.log_probs import default_chunk_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense transformer with gated feed-forward layers, as Llama's and Qwen's are."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    query_size: int
    """Of all query heads together."""
    key_size: int
    """Of all key heads together, and of all value heads."""
    is_tied: bool

    @classmethod
    def read(cls, folder: str | Path) -> ModelShape:
        """Read a model's shape from `config.json` of a folder.

        Raises:
            ValueError: if the model is of another kind, such as one with experts.
        """
        config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        config = config.get("text_config") or config
        needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        missing = [name for name in needed if not isinstance(config.get(name), int)]
        experts = [name for name in config if "expert" in name and config[name]]
        if missing or experts:
            raise ValueError(
                f"{folder}: memory is planned for dense transformers, and its config has "
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
            query_size=heads * head,
            key_size=(config.get("num_key_value_heads") or heads) * head,
            is_tied=bool(config.get("tie_word_embeddings", False)),
        )

    @property
    def layer_parameters(self) -> int:
        """Of one layer; biases and norms are left out."""
        return self.hidden_size * (2 * self.query_size + 2 * self.key_size + 3 * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Of the output head, and of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Of the whole model."""
        return self.num_layers * self.layer_parameters + self.head_parameters * (1 if self.is_tied else 2)

    def adapter_parameters(self, rank: int) -> int:
        """Return the number of parameters of LoRA adapters of all linear layers but the head."""
        hidden = self.hidden_size
        queries = self.query_size
        keys = self.key_size
        wide = self.intermediate_size
        return self.num_layers * rank * (2 * (hidden + queries) + 2 * (hidden + keys) + 3 * (hidden + wide))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingShape:
    """How a model is trained."""

    num_ranks: int = 1
    """Devices that it is sharded over."""
    token_budget: int = 8192
    """Tokens of a micro-batch."""
    bin_length: int = 2048
    """Tokens that attend to each other: the longest row at least."""
    longest_row: int = 0
    """Tokens, as far as is known: a micro-batch holds one row at least."""
    gradient_checkpointing: bool = False
    offload_activations: bool = False
    """What checkpointing keeps is in the host's memory."""
    is_bfloat16: bool = True
    """Computes in bfloat16 over float32 weights."""
    lora_rank: int | None = None
    has_reference: bool = False
    """A KL to the model as it was; with adapters that is the model itself."""
    is_gpu: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on each device, by parts."""

    lasting: dict[str, int] = field(default_factory=dict)
    """From step to step: `weights`, `gradients`, `optimizer`, `reference`."""
    passing: dict[str, int] = field(default_factory=dict)
    """While a micro-batch is computed: `activations`, `gathered` (weights, cast or of others), `head`, `mask`."""
    loading: int = 0
    """While the model is loaded: it is whole on each device before it is sharded."""

    @property
    def total(self) -> int:
        """The most that is held at once."""
        return max(sum(self.lasting.values()) + sum(self.passing.values()), self.loading)


def plan_memory(model: ModelShape, training: TrainingShape) -> MemoryPlan:
    """Count the bytes that each device of a trainer holds.

    Activations are what autograd keeps of a layer: in float32 8 values of the hidden size, 5.5 of the queries', 4.5 of
    the keys' and 5 of the feed-forward's a token; under autocast residuals and norms stay float32. A test holds these
    numbers, and the head's, against what is measured.

    Args:
        model: its shape.
        training: how it is trained.

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
    ranks = training.num_ranks
    # float32: 4 bytes a weight and its gradient, 8 of Adam's two moments; each rank has its share.
    lasting = {"weights": 4 * weights // ranks, "gradients": 4 * trained // ranks, "optimizer": 8 * trained // ranks}
    loading = 4 * parameters
    if training.has_reference and training.lora_rank is None:  # with adapters it is the model without them
        lasting["reference"] = 4 * parameters // ranks
        if ranks > 1:  # it is loaded whole when the policy is there already
            loading += lasting["weights"]
    passing = {
        "activations": _activations(model, training),
        "gathered": _gathered(model, training),
        "head": _head(model, training),
        "mask": 0,  # on a GPU blocks of it, or none
    }
    if not training.is_gpu:
        passing["mask"] = _num_tokens(training) * training.bin_length
    return MemoryPlan(lasting, passing, loading)


def _num_tokens(training: TrainingShape) -> int:
    """Return the tokens of the largest micro-batch: it holds one row at least."""
    return max(training.token_budget, training.longest_row)


def _activations(model: ModelShape, training: TrainingShape) -> int:
    """Return the bytes that autograd keeps of a micro-batch."""
    tokens = _num_tokens(training)
    hidden = model.hidden_size
    queries = model.query_size
    keys = model.key_size
    wide = model.intermediate_size
    layer = tokens * 4 * (8 * hidden + 5.5 * queries + 4.5 * keys + 5 * wide)
    if training.is_bfloat16:
        layer = tokens * (30 * hidden + 11 * queries + 9 * keys + 10 * wide)
    ends = 16 * tokens * hidden  # embedding, last norm, what the head reads
    if not training.gradient_checkpointing:
        return int(layer * model.num_layers + ends)
    # Each layer's input, and one layer as it is computed again.
    num_inputs = model.num_layers
    if training.offload_activations:
        num_inputs = 2  # one is fetched while one is used
    return int(4 * tokens * hidden * num_inputs + layer + ends)


def _gathered(model: ModelShape, training: TrainingShape) -> int:
    """Return the bytes of layers' weights besides the ones that last: cast, or those of other ranks."""
    layer = model.layer_parameters
    if training.num_ranks > 1:
        # A layer, the next one that is fetched meanwhile, and the gradient before it is scattered.
        return layer * (2 * _weight_size(training) + 4)
    if not training.is_bfloat16:
        return 0
    # Copies that the backward pass needs: with checkpointing of the layer that is computed again.
    if training.gradient_checkpointing:
        return 2 * layer
    return 2 * layer * model.num_layers


def _head(model: ModelShape, training: TrainingShape) -> int:
    """Return the bytes of the output head beside its weights: a copy, its gradient, and a chunk of logits, twice."""
    num_bytes = 0
    if training.num_ranks > 1 or training.is_bfloat16:
        num_bytes += _weight_size(training) * model.head_parameters
    if training.lora_rank is None:
        num_bytes += 4 * model.head_parameters
    positions = default_chunk_size(model.vocab_size, is_gpu=training.is_gpu)
    if training.is_gpu:
        positions = min(positions, _num_tokens(training))
    return num_bytes + 2 * 4 * model.vocab_size * positions


def _weight_size(training: TrainingShape) -> int:
    """Return the bytes of a weight as it is computed with."""
    return 2 if training.is_bfloat16 else 4


def what_fits(model: ModelShape, training: TrainingShape, num_bytes: int) -> list[str]:
    """Return the least changes, each alone the first of its kind, with which a device of `num_bytes` is enough."""
    found = []
    for kind in _changes(training):
        for entries, changed in kind:
            if plan_memory(model, changed).total <= num_bytes:
                found.append(entries)
                break
    return found


def _changes(training: TrainingShape) -> Iterator[Iterator[tuple[str, TrainingShape]]]:
    """Return changes by kind, those of a kind from the least on."""
    least = max(512, training.longest_row)  # what is shorter than a row bounds nothing
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
    yield (
        (f"train.num_ranks={ranks}{also}", replace(smallest, num_ranks=ranks))
        for ranks in (2, 4, 8, 16, 32)
        if ranks > training.num_ranks
    )
    yield ((f"model.lora.rank=16{also}", replace(smallest, lora_rank=16)) for _ in range(training.lora_rank is None))
