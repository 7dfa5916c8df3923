"""Peak memory of each rank of a sharded trainer, beside its share of the model: loading and checkpoint.

Four ranks (gloo) load a Llama of 394M parameters in float32 from a file in bfloat16, have AdamW's moments, and write a
checkpoint. A rank's share is its part of weights and moments, and one layer. What counts is anonymous memory above that
of the process before it loaded: pages of the files are the system's, which gives them up. The loaded weights are
compared with those of the file, bit by bit.
"""

from __future__ import annotations

import contextlib
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
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from llmrl.runs.tracked import split_tracked
from llmrl.trainer import load_model

NUM_RANKS = 4
SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 28, "vocab_size": 16384,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
GOAL = 1.15


def _anonymous() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


@contextlib.contextmanager
def _peak(peaks: dict[str, float], name: str) -> Iterator[None]:
    """Sample this process's anonymous memory, in GiB, and keep the most."""
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


def run_rank(folder: Path) -> dict[str, float]:
    """Return this rank's peaks, as ratios to its share."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    load_model(folder / "small", mesh=mesh)  # imports and buffers of the process group
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
                raise AssertionError(f"{name} is not that of the file")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, foreach=False)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        optimizer.state[parameter]["exp_avg"].to_local().fill_(1.0)
        optimizer.state[parameter]["exp_avg_sq"].to_local().fill_(1.0)
    with _peak(peaks, "checkpoint"):
        _, shards = split_tracked({"model": model, "optimizer": optimizer}, folder, 1)
        assert shards is not None
        shards.write()
        if dist.get_rank() == 0:
            shards.record()
    shares = {"load": size / NUM_RANKS + layer, "checkpoint": 3 * size / NUM_RANKS + layer}
    dist.barrier()
    dist.destroy_process_group()
    return {name: (peaks[name] - floor) / share for name, share in shares.items()}


def run() -> dict[str, Any]:
    """Make the model, start the ranks, and compare their peaks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().save_pretrained(folder / "model", max_shard_size="9GB")
        LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1, "vocab_size": 64})).save_pretrained(
            folder / "small"
        )
        gc.collect()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}",
            "-m", "benchmarks.sharded_memory", name,
        ]  # fmt: skip
        environ = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=Path(__file__).parent.parent, env=environ, check=True)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    worst = {part: max(one[part] for one in ranks) for part in ranks[0]}
    print(f"{'rank':>8}" + "".join(f"{part:>12}" for part in worst))
    for rank, one in enumerate(ranks):
        print(f"{rank:8}" + "".join(f"{one[part]:12.3f}" for part in worst))
    ratio = max(worst.values())
    return {
        "name": "sharded_memory",
        "ratio": ratio,
        "ratio_of": "peak anonymous memory of a rank to its share and a layer, worst rank and part",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": worst,
    }


if __name__ == "__main__":
    measured = run_rank(Path(sys.argv[1]))
    Path(sys.argv[1], f"{os.environ['RANK']}.json").write_text(json.dumps(measured))
