"""Peak memory of each rank of a sharded trainer, relative to its share of the model and to the planner's estimate.

Four ranks (gloo) load Llamas of three sizes in float32 from a bfloat16 file, make AdamW steps over two micro-batches
each, read the weights as a weight update does, write a checkpoint and export the model. A rank's share is its part of
weights and moments, and one layer; the peak of a step is divided by the estimate of `plan_memory`. Only anonymous
memory above that of the process before loading counts, because the system can drop pages of files. The loaded weights
must equal those of the file. The goal is for the largest model: in the smaller ones, the embedding is larger than a
layer.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from tensordict import TensorDict, lazy_stack
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from llmrl.objectives import SFTLoss
from llmrl.runs.model_files import ExportedModel
from llmrl.runs.tracked import split_tracked
from llmrl.trainer import TransformersWrapper, load_model, make_optimizer, train_step
from llmrl.trainer.memory_plan import ModelShape, TrainingShape, plan_memory
from llmrl.weight_sync.source import ModelWeights

NUM_RANKS = 4
MODELS: dict[str, dict[str, Any]] = {
    "137M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 16384},
    "240M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "vocab_size": 16384},
    "394M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 28, "vocab_size": 16384},
}
TRAINING = TrainingShape(num_ranks=NUM_RANKS, token_budget=128, bin_length=128, is_half=False, is_gpu=False)
NUM_ROWS = 8
GOAL = 1.15


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


@contextlib.contextmanager
def _peak(peaks: dict[str, float], name: str) -> Iterator[None]:
    """Sample this process's anonymous memory in GiB, and record the peak."""
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.002):
            peaks[name] = max(peaks.get(name, 0.0), _anonymous())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        yield
    finally:
        is_over.set()
        sampler.join()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


def run_rank(folder: Path) -> dict[str, float]:
    """Return this rank's peaks, relative to its share or to the plan."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    _train(load_model(folder / "small", mesh=mesh))  # imports, and buffers of the process group
    gc.collect()
    floor = _anonymous()
    peaks: dict[str, float] = {}
    with _peak(peaks, "load"):
        model = load_model(folder / "model", mesh=mesh)
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**30
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters()) * 4 / 2**30
    with safe_open(folder / "model" / "model.safetensors", framework="pt") as file:
        for name, parameter in model.named_parameters():
            whole = parameter.full_tensor()
            if dist.get_rank() == 0 and not torch.equal(whole, file.get_tensor(name).float()):
                raise AssertionError(f"{name} differs from the file")
    with _peak(peaks, "step"):
        optimizer = _train(model)
    with _peak(peaks, "update"):
        for _ in ModelWeights(model, torch.bfloat16):
            pass
    with _peak(peaks, "checkpoint"):
        _, shards = split_tracked({"model": model, "optimizer": optimizer}, folder, 1)
        assert shards is not None
        shards.write()
        if dist.get_rank() == 0:
            shards.record()
    with _peak(peaks, "export"):
        exported = ExportedModel(model)
        if dist.get_rank() == 0:
            (folder / "exported").mkdir()
            exported.write(folder / "exported", "5GB")
        else:
            exported.gather()
    lasting = 3 * size / NUM_RANKS + layer
    shares = {"load": size / NUM_RANKS + layer, "update": lasting, "checkpoint": lasting, "export": lasting}
    shares["step"] = plan_memory(ModelShape.read(folder / "model"), TRAINING).total / 2**30
    dist.barrier()
    dist.destroy_process_group()
    return {name: (peaks[name] - floor) / shares[name] for name in peaks}


def _train(model: Any) -> torch.optim.Optimizer:
    """Make two steps; the second one starts with the optimizer's moments."""
    budget = TRAINING.token_budget
    policy = TransformersWrapper(model, generate=False, token_budget=budget, bin_length=budget)
    optimizer, _ = make_optimizer(model, learning_rate=1e-6)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, (NUM_ROWS, budget), generator=generator)
    mask = torch.arange(budget) > 0
    rows = [TensorDict({"tokens": {"full": row}, "masks": {"all_assistant_mask": mask}}) for row in tokens]
    for _ in range(2):
        report = train_step(SFTLoss(policy), lazy_stack(rows), optimizer)
        if report.is_skipped:
            raise AssertionError(report.skip_reason)
    return optimizer


def run() -> dict[str, Any]:
    """Create the models, start the ranks, and compare their peaks."""
    measured: dict[str, float] = {}
    for name, sizes in MODELS.items():
        worst = _measure(sizes)
        measured |= {f"{part}, {name}": ratio for part, ratio in worst.items()}
    ratio = max(worst.values())
    return {
        "name": "sharded_memory",
        "ratio": ratio,
        "ratio_of": "peak of a rank to its share and one layer, or to the plan of a step; worst rank and part, 394M",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": measured,
    }


def _measure(sizes: dict[str, Any]) -> dict[str, float]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).bfloat16()
        model.save_pretrained(folder / "model", max_shard_size="9GB")
        small = {**sizes, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        LlamaForCausalLM(LlamaConfig(**small, **heads)).save_pretrained(folder / "small")
        del model
        gc.collect()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
            "-m", "benchmarks.sharded_memory", name,
        ]  # fmt: skip
        # Freed memory is returned to the system immediately, so that peaks do not depend on the allocator.
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
        }
        subprocess.run(command, cwd=Path(__file__).parent.parent, env=environ, check=True)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return {part: max(one[part] for one in ranks) for part in ranks[0]}


if __name__ == "__main__":
    measured = run_rank(Path(sys.argv[1]))
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(measured))
