"""Sharding of weights, gradients and optimizer states over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from llmrl._utils.model_parts import decoder_of, text_config, without_adapters
from llmrl.trainer.context import ContextRanks
from llmrl.trainer.packing.attention import CONTEXT_RANKS
from llmrl.trainer.trained_model import trained_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
    context_ranks: int = 1,
) -> PreTrainedModel:
    """Shard a transformers model in place with PyTorch's `fully_shard`, layer by layer, and return it.

    Create the optimizer afterwards. All ranks must start from the same weights, and must wrap the model
    (`TransformersWrapper`) and call `train_step`, `write_log_probs` and weight sync with the same batches; the ranks
    share the work. Gradients are summed over ranks, not averaged, as each rank computes a part of the batch's loss.

    Args:
        mesh: ranks over which the model is sharded, by default all. A mesh of two dimensions must contain all ranks;
            the model is replicated over the first dimension and sharded over the second.
        compute_dtype: dtype in which parameters are gathered and computed, for example `torch.bfloat16`; replaces the
            wrapper's autocast, which would gather them in float32. Gradients are summed in float32.
        context_ranks: number of neighbouring ranks that compute the same rows together, each a part
            of the tokens (`llmrl.trainer.context`), so that rows may be as many times longer. Each
            such group computes its own micro-batches.

    Raises TypeError if the model's decoder has no list of layers, and ValueError if `context_ranks`
    does not divide the number of ranks or of attention heads.
    """
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group()  # as `fully_shard` does
    num_ranks = torch.distributed.get_world_size() if mesh is None else mesh.size()
    if context_ranks < 1 or num_ranks % context_ranks:  # before anything is sharded
        raise ValueError(f"context_ranks={context_ranks} does not divide the {num_ranks} ranks of the model.")
    base = without_adapters(model)
    decoder = decoder_of(base)
    layers = getattr(decoder, "layers", None)
    if layers is None:
        raise TypeError(f"{type(decoder).__name__} has no `layers` to shard one by one.")
    num_heads = getattr(text_config(base), "num_attention_heads", 0)
    if context_ranks > 1 and (not num_heads or num_heads % context_ranks):
        raise ValueError(f"context_ranks={context_ranks} does not divide the model's {num_heads} attention heads.")
    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    head = base.get_output_embeddings()
    embedding = base.get_input_embeddings()
    is_tied = getattr(head, "weight", None) is embedding.weight
    # The root is the decoder because only the decoder is called, not the whole model. It is resharded after its
    # forward pass so that its parameters are sharded whenever the head's weight is read from it.
    for module in [*layers, decoder]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if is_tied:
        head.weight = embedding.weight
    else:
        fully_shard(head, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    record = trained_model(model)
    record.mesh = mesh or cast(DTensor, next(decoder.parameters())).device_mesh
    if context_ranks > 1:
        record.context = ContextRanks.of(record.mesh.device_type, num_ranks, context_ranks)
        for module in base.modules():
            setattr(module, CONTEXT_RANKS, record.context)
    if compute_dtype is not None:
        record.compute_in(compute_dtype, torch.device(record.mesh.device_type))
        record.sharded_dtype = compute_dtype
    for module in base.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return model
