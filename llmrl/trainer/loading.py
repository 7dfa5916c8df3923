"""Loading of the trained model, with or without LoRA adapters, and of references and teachers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torch.distributed.tensor import distribute_tensor

from llmrl._utils.arguments import check_least
from llmrl._utils.imports import require
from llmrl._utils.model_parts import load_language_model
from llmrl._utils.types import Tokenizer
from llmrl.trainer.engine_teacher import check_same_tokenizer
from llmrl.trainer.scoring import write_log_probs
from llmrl.trainer.sharding import shard_model
from llmrl.trainer.trained_model import trained_model
from llmrl.trainer.transformers_wrapper import TransformersWrapper

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

_Adapted: TypeAlias = tuple[torch.nn.Module, str, Any]
"""Parent of an adapted layer, name of the layer in its parent, and the layer."""

REF_LOG_PROBS: NestedKey = ("next", "ref_log_probs", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685) of linear layers; the layers' weights are frozen. There is no dropout."""

    rank: int = 16
    """Rank of the update of each weight; at least 1."""
    alpha: int = 32
    """Scale of the update, which is multiplied by `alpha / rank`; at least 1."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of adapted layers, or `all-linear` for all linear layers except the output head."""
    quantize_base: bool = False
    """Whether bitsandbytes stores the weights under the adapters in 4 bits (QLoRA, arXiv:2305.14314)."""

    def __post_init__(self) -> None:
        check_least(1, rank=self.rank, alpha=self.alpha)


def load_model(
    path: str | Path,
    *,
    device: str | torch.device = "cpu",
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype | None = None,
    context_ranks: int = 1,
    gradient_checkpointing: bool = False,
    lora: LoRAConfig | None = None,
) -> PreTrainedModel:
    """Load a causal language model for training, in float32; of a vision-language model, only the language model.

    Args:
        path: folder, or name on the Hugging Face Hub.
        mesh: ranks over which the model is sharded (`shard_model`); each rank reads its own part of
            the files. All ranks must have the same random state.
        compute_dtype: see `shard_model`; without `mesh` it is ignored, since the policy's `autocast_dtype` sets it.
        context_ranks: see `shard_model`; above 1 only with `mesh`.
        gradient_checkpointing: whether to recompute activations in the backward pass, which saves memory.
        lora: adapters, which are then the only trained parameters. If their base is quantized, send the weights to the
            engines before the first rollout, so that they compute with the quantized values.

    Raises:
        MissingExtraError: if `lora` is given and peft, or bitsandbytes for a quantized base, is not installed.
        ValueError: if `lora.target_modules` names no layer of the model, if a quantized base would
            be sharded, or if `context_ranks` is not 1 without a mesh.

    Example:
        >>> import tempfile
        >>> from llmrl.testing import make_tiny_model
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = load_model(make_tiny_model(folder), lora=LoRAConfig(rank=2))
        >>> {name.split(".")[-3] for name, weight in model.named_parameters() if weight.requires_grad}
        {...'lora_A'...}
    """
    if mesh is None and context_ranks != 1:
        raise ValueError(
            f"context_ranks={context_ranks} needs mesh, the ranks that compute a row together, got None: "
            "pass the mesh, or leave context_ranks=1."
        )
    quantize = lora is not None and lora.quantize_base
    if quantize:
        require("bitsandbytes", extra="optim")

    def prepare(model: PreTrainedModel) -> PreTrainedModel:
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        return model if lora is None else add_adapters(model, lora)

    if mesh is None:
        return prepare(load_language_model(path, dtype=torch.float32, device=device, quantize=quantize))
    if quantize:
        raise ValueError("quantize_base=True is for one rank (mesh=None): 4-bit weights cannot be sharded.")
    prepared: list[PreTrainedModel] = []
    adapted: list[_Adapted] = []

    def distribute(model: PreTrainedModel) -> None:
        model.tie_weights()
        random_state = torch.get_rng_state()
        prepared.append(prepare(model))
        torch.set_rng_state(random_state)  # `_draw_adapter` draws the adapters later from this state
        shard_model(prepared[0], mesh, compute_dtype=compute_dtype, context_ranks=context_ranks)
        # The files contain names without adapters, so base layers replace adapted layers while the files are read.
        adapted.extend(_adapted_layers(model))
        for parent, name, layer in adapted:
            setattr(parent, name, layer.get_base_layer())

    load_language_model(path, dtype=torch.float32, device=device, distribute=distribute)
    for parent, name, layer in adapted:
        setattr(parent, name, layer)
    layers = [one for _, _, layer in adapted for one in _wrapped_by(layer)]
    # The order is peft's, which adapts layers before single parameters (such as those of experts).
    for layer in sorted(layers, key=lambda one: hasattr(one, "parameter_name")):
        _draw_adapter(layer, device)
    return prepared[0]


def add_adapters(model: PreTrainedModel, lora: LoRAConfig) -> PreTrainedModel:
    """Add adapters in place and return the peft model around the model; raise the errors of `load_model`."""
    require("peft", extra="lora")
    import peft

    modules = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    config = peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=modules, lora_dropout=0.0, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, config)


def _adapted_layers(model: torch.nn.Module) -> Iterator[_Adapted]:
    """Yield the layers with adapters and their places in the model."""
    for path, layer in model.named_modules():
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        if hasattr(layer, "lora_A") and not hasattr(parent, "lora_A"):
            yield parent, name, layer


def _wrapped_by(layer: Any) -> list[Any]:
    """Return an adapted layer and the adapted layers that it wraps, in the order in which peft created them."""
    if not hasattr(layer.base_layer, "lora_A"):
        return [layer]
    return [*_wrapped_by(layer.base_layer), layer]


def _draw_adapter(layer: Any, device: str | torch.device) -> None:
    """Allocate and initialise a sharded adapter, drawing the same numbers in the same order as peft."""
    (adapter,) = layer.lora_A
    parts = [layer.lora_A[adapter], layer.lora_B[adapter]]
    downward, upward = (torch.nn.Linear(part.in_features, part.out_features, bias=False) for part in parts)
    torch.nn.init.kaiming_uniform_(downward.weight, a=math.sqrt(5))
    torch.nn.init.zeros_(upward.weight)
    for part, whole in zip(parts, (downward, upward), strict=True):
        like = part.weight
        values = distribute_tensor(whole.weight.data.to(device), like.device_mesh, like.placements, src_data_rank=None)
        part.weight = torch.nn.Parameter(values)


def make_reference(policy: TransformersWrapper, path: str | Path) -> Callable[[TensorDictBase], TensorDictBase]:
    """Return a function that writes a reference's log-probs into a batch, under `("next", "ref_log_probs", "full")`.

    The reference is the policy's model before training: with adapters, the policy with adapters disabled; otherwise
    the model at `path`, frozen and sharded like the policy. Call the function on a batch before
    training with `kl_to_ref_coeff`, and not while another thread trains the policy.
    """
    if hasattr(policy.model, "disable_adapter"):
        return partial(write_log_probs, policy, key=REF_LOG_PROBS, disable_adapter=True)
    scorer = _scorer(policy, path)

    def score(batch: TensorDictBase) -> TensorDictBase:
        trained_model(scorer.model).engine_length = trained_model(policy.model).engine_length
        return write_log_probs(scorer, batch, key=REF_LOG_PROBS)

    return score


def load_teacher(policy: TransformersWrapper, path: str | Path, *, tokenizer: Tokenizer) -> TransformersWrapper:
    """Load a frozen teacher, sharded like the policy; raise ValueError if its vocabulary differs from `tokenizer`'s."""
    from transformers import AutoTokenizer

    check_same_tokenizer(tokenizer, AutoTokenizer.from_pretrained(path), teacher=str(path))
    teacher = _scorer(policy, path)
    teacher.replays_experts = False
    return teacher


def _scorer(policy: TransformersWrapper, path: str | Path) -> TransformersWrapper:
    trained = trained_model(policy.model)
    frozen = load_model(
        path,
        device=policy.device,
        mesh=trained.mesh,
        compute_dtype=trained.sharded_dtype,
        context_ranks=trained.num_context_ranks,
    )
    return policy.get_new_version(model=frozen.requires_grad_(False), offload_activations=False)
