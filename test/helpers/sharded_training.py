"""Training steps of a model sharded over gloo processes: `python sharded_training.py KINDS RANK NUM_RANKS FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from causal_types import tiny_model as tiny_type
from loss_batches import VOCAB_SIZE, ragged_batch, tiny_model, with_lora, with_prompts
from torch.distributed.tensor import DTensor

from llmrl.engines import EngineError, TransformersEngine
from llmrl.objectives import GRPOLoss
from llmrl.trainer import EngineTeacher, TransformersWrapper, shard_model, train_step, write_log_probs


def make_policy(kind: str):
    """`tied`, `untied`, `lora`, packed layers with a state (`hybrid`), or rows that are split (`context`)."""
    if kind.startswith("context"):
        model = tiny_type(kind.split()[1])
        model = with_lora(model, ["q_proj", "down_proj"]) if "lora" in kind else model
        return TransformersWrapper(model, generate=False, token_budget=30, bin_length=30)
    if kind.startswith("hybrid"):
        model = tiny_type("qwen3_5_text")
        model = with_lora(model, ["in_proj_qkv", "out_proj", "q_proj", "down_proj"]) if "lora" in kind else model
        return TransformersWrapper(model, generate=False, token_budget=60, bin_length=60)
    model = tiny_model(is_tied=kind == "tied")
    model = with_lora(model, ["q_proj", "lm_head"]) if kind == "lora" else model
    return TransformersWrapper(model, generate=False, token_budget=24)


def step_batch(kind: str, seed: int):
    """Rows of a step; those of hybrids share prompts that are long enough to be computed once."""
    batch = ragged_batch(seed, num_rows=9)
    if not kind.startswith("hybrid"):
        return batch
    prompts = [torch.arange(length) % VOCAB_SIZE for length in (40, 23)]
    return with_prompts(batch, [prompts[place % 2] for place in range(9)])


def step(policy, kind: str):
    """Two steps; what they report, and the parameters after them."""
    model = policy.model
    # Every loss term, so that each needs the right denominator; SGD, so that a wrong scale shows.
    loss = GRPOLoss(policy, clip_epsilon=(1.0, 1e4), kl_to_ref_coeff=0.1, aggregation="sequence_mean")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    reports = [train_step(loss, step_batch(kind, seed), optimizer, max_grad_norm=1.0) for seed in (0, 1)]
    parameters = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    return reports, parameters


OLD_LOG_PROBS = ("old_log_probs", "full")
PRECISIONS = ["autocast", "compute_dtype"]
NUM_MICRO_BATCHES = {1: 1_000, 5: 24}
"""Token budget by the number of micro-batches that it makes of `gradient_batch`."""


def gradient_batch():
    """What gradients are compared on."""
    return ragged_batch(0, num_rows=16)


def sharded_gradients(precision: str, *, is_tied: bool, token_budget: int) -> dict[str, torch.Tensor]:
    """The gradient of a batch in bfloat16 over float32 weights, from one step of plain gradient descent."""
    model = tiny_model(is_tied=is_tied)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    autocast_dtype = torch.bfloat16 if precision == "autocast" else None
    policy = TransformersWrapper(
        model, generate=False, token_budget=token_budget, bin_length=24, autocast_dtype=autocast_dtype
    )
    shard_model(model, compute_dtype=torch.bfloat16 if precision == "compute_dtype" else None)
    loss, optimizer = GRPOLoss(policy, clip_epsilon=(1.0, 1e4)), torch.optim.SGD(model.parameters(), lr=1.0)
    train_step(loss, gradient_batch(), optimizer, max_grad_norm=None)
    return {name: before[name] - p.full_tensor().detach() for name, p in model.named_parameters()}


def gathered_dtypes(precision: str, *, is_tied: bool) -> set[torch.dtype]:
    """The dtypes in which whole weights are gathered outside of the layers' own sharding: the head's."""
    dtypes, gather = set(), DTensor.full_tensor

    def spy(parameter: DTensor, **arguments: Any) -> torch.Tensor:
        dtypes.add(parameter.dtype)
        return gather(parameter, **arguments)

    policy = TransformersWrapper(tiny_model(is_tied=is_tied), generate=False)
    shard_model(policy.model, compute_dtype=torch.bfloat16 if precision == "compute_dtype" else None)
    DTensor.full_tensor = spy
    policy(gradient_batch())
    DTensor.full_tensor = gather
    return dtypes


def scored_together(key: Any) -> dict[str, Any]:
    """What ranks that share the work write, how many micro-batches this one computed, and how many there are."""
    policy = TransformersWrapper(tiny_model(), generate=False, token_budget=24, bin_length=24)
    shard_model(policy.model)
    batch, num_passes, score = gradient_batch(), 0, policy.packed_log_probs

    def counted(packed: Any, **arguments: Any) -> Any:
        nonlocal num_passes
        num_passes += 1
        return score(packed, **arguments)

    policy.packed_log_probs = counted
    write_log_probs(policy, batch, key)
    columns = ([row[name] for row in batch.unbind(0)] for name in (("tokens", "full"), ("masks", "all_assistant_mask")))
    return {"rows": [row[key] for row in batch.unbind(0)], "own": num_passes, "all": len(policy.pack(*columns))}


def scored_by_an_engine(key: Any) -> dict[str, Any]:
    """What ranks write that share the rows among their teacher's engines, and how many rows this one asked for."""
    policy = TransformersWrapper(tiny_model(), generate=False)
    shard_model(policy.model)
    asked = []

    class Counted(TransformersEngine):
        is_gone = False

        async def score(self, token_ids: Any, *, top_k: int = 0) -> Any:
            if self.is_gone:
                raise EngineError("the teacher is gone")
            asked.append(token_ids)
            return await super().score(token_ids, top_k=top_k)

    batch = gradient_batch()
    with Counted(tiny_model()) as engine:
        teacher = EngineTeacher(policy, engine, tokenizer=None)
        engine.is_gone = dist.get_rank() == 1
        errors = [None] * dist.get_world_size()
        try:
            write_log_probs(teacher, batch, key)
        except (EngineError, RuntimeError) as error:
            dist.all_gather_object(errors, f"{type(error).__name__}: {error}")
        engine.is_gone = False
        asked.clear()
        write_log_probs(teacher, batch, key)
    return {"rows": [row[key] for row in batch.unbind(0)], "own": len(asked), "errors": errors}


def main() -> None:
    """Shard, step, save what rank 0 has."""
    kinds, rank, num_ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    results: dict[Any, Any] = {
        (precision, is_tied, num_micro_batches): sharded_gradients(
            precision, is_tied=is_tied, token_budget=NUM_MICRO_BATCHES[num_micro_batches]
        )
        for precision in PRECISIONS
        for is_tied in (False, True)
        for num_micro_batches in NUM_MICRO_BATCHES
    }
    results["gathered"] = {
        (precision, is_tied): gathered_dtypes(precision, is_tied=is_tied)
        for precision in (None, "compute_dtype")
        for is_tied in (False, True)
    }
    results["scored"] = scored_together(OLD_LOG_PROBS)
    results["by an engine"] = scored_by_an_engine(OLD_LOG_PROBS)
    for one in kinds.split(","):
        policy = make_policy(one)
        shard_model(policy.model, context_ranks=2 if one.startswith("context") else 1)
        num_held = sum(p.to_local().numel() for p in policy.model.parameters())
        reports, parameters = step(policy, one)
        results[one] = {
            "reports": [report.to_metrics() for report in reports],
            "parameters": parameters,
            "num_held": num_held,
        }
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
