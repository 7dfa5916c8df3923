"""One training step of a model sharded over gloo processes: `python sharded_training.py KIND RANK NUM_RANKS FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from loss_batches import ragged_batch, tiny_model, with_lora
from torch.distributed.tensor import DTensor

from llmrl.objectives import GRPOLoss, train_step
from llmrl.policies import TransformersWrapper, shard_model


def make_policy(kind: str):
    """`tied`, `untied` or `lora`."""
    model = tiny_model(is_tied=kind == "tied")
    model = with_lora(model, ["q_proj", "lm_head"]) if kind == "lora" else model
    return TransformersWrapper(model, token_budget=24)


def step(policy, process_group=None):
    """Two steps; what they report, and the parameters after them."""
    model = policy.model
    # Every loss term, so that each needs the right denominator; SGD, so that a wrong scale shows.
    loss = GRPOLoss(policy, clip_epsilon=(1.0, 1e4), kl_to_ref_coeff=0.1, aggregation="sequence_mean")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    reports = [
        train_step(loss, ragged_batch(seed, num_rows=9), optimizer, max_grad_norm=1.0, process_group=process_group)
        for seed in (0, 1)
    ]
    parameters = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters()
    }
    return reports, parameters


def main() -> None:
    """Shard, step, save what rank 0 has."""
    kind, rank, num_ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    results = {}
    for one in kind.split(","):
        policy = make_policy(one)
        shard_model(policy.model)
        num_held = sum(p.to_local().numel() for p in policy.model.parameters())
        reports, parameters = step(policy, dist.group.WORLD)
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
