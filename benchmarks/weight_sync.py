"""Seconds of a weight sync, compared with saving and reloading a checkpoint and with one copy in memory.

TorchRL 0.14.1 cannot update a vLLM 0.32 engine on a CPU, so only writing and reading its files is compared:

- its receiver calls `load_weights_from_storage`, which no worker of vLLM has (`NotImplementedError`);
- if it calls the model's `load_weights` itself, this fails for parameters that vLLM has packed and emptied
  (`AttributeError: 'Parameter' object has no attribute 'weight_loader'`);
- its own asynchronous engine needs GPUs in Ray, and its other scheme needs NCCL.

No sync can cost less than one copy and the packing of every matrix for vLLM's CPU kernels. This lower bound is printed
with the goal, which not every machine reaches.

Deltas of real AdamW steps are compared with all weights, in bytes and in seconds: through files, and by gloo to a
process on this host. On one host a broadcast of all weights costs little more than a copy, so deltas save bytes, but
save seconds only if few values changed. Engines wait for reading and sending, but not for writing and packing.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.weight_deltas import measure_deltas, seconds_of
from llmrl.engines import AsyncVLLM
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata

NUM_REPEATS = 7
GOAL = 0.1
"""Maximum share of the time to save a checkpoint into the page cache and reload it with vLLM."""
GROWTH = {"2M": (128, 4, 8192), "20M": (384, 8, 16384), "100M": (768, 12, 32768), "360M": (1024, 24, 49152)}
"""Random Llamas: hidden size, number of layers, size of the vocabulary."""
TITLES = {
    "sync": "sync, total",
    "stage_s": "  pack and cast (the engine generates)",
    "pause_s": "  pause",
    "send_s": "  send and check (the engine waits)",
    "load_s": "  load, empty the prefix cache (the engine waits)",
    "resume_s": "  resume",
    "copy": "copy the same bytes once",
    "repack": "pack each matrix again, as vLLM's kernels need it",
    "checkpoint": "save and reload a checkpoint",
    "double_buffer": "sync through files (double buffer)",
    "torchrl_files": "torchrl's double buffer: write and read the files",
}


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each column without the first two rows, which touch both buffers for the first time."""
    return {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}


def start(path: str) -> AsyncVLLM:
    """Start an engine."""
    return AsyncVLLM.from_pretrained(
        path,
        max_model_len=512,
        dtype="bfloat16",
        kv_cache_memory=1 << 28,
        engine_args={"skip_tokenizer_init": True},
    )


def make_repack(model: torch.nn.Module) -> Callable[[], None]:
    """Return a function that packs matrices of the engine's shapes, fused as in a Llama, as vLLM does on loading."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    config = model.config
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    shapes = [
        (heads * config.head_dim, config.hidden_size),
        (config.hidden_size, config.num_attention_heads * config.head_dim),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ] * config.num_hidden_layers
    shapes.append((config.vocab_size, config.hidden_size))
    layers = [SimpleNamespace(weight=torch.zeros(shape, dtype=torch.bfloat16), bias=None) for shape in shapes]

    def repack() -> None:
        for layer in layers:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    return repack


def make_torchrl_files(model: torch.nn.Module, folder: str) -> Callable[[], None]:
    """Return a function that writes and reads the files of torchrl's scheme, which cannot update vLLM."""
    logging.getLogger("torchrl").setLevel("WARNING")
    from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferSyncScheme as TorchRLScheme

    scheme = TorchRLScheme(remote_addr=folder, strategy="state_dict")
    sender, transport = scheme.create_sender(), scheme.create_transport()
    sender.register_model(model)

    def write_and_read() -> None:
        sender.update_weights()
        for weight in transport.receive_weights().values():
            weight.clone()

    return write_and_read


def measure(path: str) -> tuple[dict[str, float], int]:
    """Return the medians for the model in `path`, and the number of bytes sent."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    metadata = get_model_metadata(model, torch.bfloat16)
    num_bytes = sum(dtype.itemsize * shape.numel() for dtype, shape in metadata.values())
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)
    repack = make_repack(model)

    rows: list[dict[str, float]] = []
    with start(path) as engine, tempfile.TemporaryDirectory() as folder:
        sender = VLLMWeightSyncScheme().create_sender()
        files_sender = VLLMDoubleBufferSyncScheme(remote_addr=f"{folder}/files").create_sender()
        torchrl_files = make_torchrl_files(model, f"{folder}/torchrl")

        def by_checkpoint() -> None:
            model.to(torch.bfloat16).save_pretrained(f"{folder}/checkpoint")
            engine.pause("keep", clear_cache=False)
            reload = engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": f"{folder}/checkpoint"})
            engine._background.run(reload)
            engine.reset_prefix_cache()
            engine.resume()

        sender.register_model(model)
        sender.init_all_workers_group(metadata, engine)
        # Alternate the cases, so that a disturbance of the machine affects all alike.
        for _ in range(NUM_REPEATS + 2):
            model.to(torch.float32)
            row = {"sync": seconds_of(sender.update_weights), **sender.last_timings}
            row["copy"] = seconds_of(lambda: target.copy_(source))
            row["repack"] = seconds_of(repack)
            row["checkpoint"] = seconds_of(by_checkpoint)
            rows.append(row)
        sender.shutdown()

        # An engine accepts one sender at a time.
        model.to(torch.float32)
        files_sender.register_model(model)
        files_sender.init_all_workers_group(metadata, engine)
        files_rows = [
            {"double_buffer": seconds_of(files_sender.update_weights), "torchrl_files": seconds_of(torchrl_files)}
            for _ in range(NUM_REPEATS + 2)
        ]
        files_sender.shutdown()
    return medians_of(rows) | medians_of(files_rows), num_bytes


def measure_growth() -> dict[str, dict[str, float]]:
    """Return the seconds of a sync for random models of several sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    results = {}
    for name, (hidden_size, num_layers, vocab_size) in GROWTH.items():
        config = LlamaConfig(
            vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=8 * hidden_size // 3 // 64 * 64,
            num_hidden_layers=num_layers, num_attention_heads=hidden_size // 64,
            num_key_value_heads=hidden_size // 128, head_dim=64, tie_word_embeddings=True,
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            model = LlamaForCausalLM(config).to(torch.bfloat16)
            model.save_pretrained(folder)
            with start(folder) as engine:
                sender = VLLMWeightSyncScheme().create_sender()
                sender.register_model(model)
                sender.init_all_workers_group(get_model_metadata(model), engine)
                rows = [
                    {"sync": seconds_of(sender.update_weights), **sender.last_timings} for _ in range(NUM_REPEATS + 2)
                ]
                sender.shutdown()
        results[name] = {**medians_of(rows), "num_parameters": float(model.num_parameters())}
    return results


def run() -> dict[str, Any]:
    """Measure the embedded model, then random models of growing size, then deltas of real steps."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    medians, num_bytes = measure(str(Path(ensure_embedded_model())))
    console = Console()
    table = Table(title=f"One weight sync of {num_bytes / 1e6:.0f} MB, median of {NUM_REPEATS}")
    table.add_column("measured")
    table.add_column("seconds", justify="right")
    for name, title in TITLES.items():
        table.add_row(title, f"{medians[name]:.3f}")
    allowed = 3 * medians["copy"] + medians["repack"]
    stands_still = medians["sync"] - medians["stage_s"]
    table.add_row("engine waits", f"{stands_still:.3f}")
    table.add_row("three copies and the packing (the sync should not cost more)", f"{allowed:.3f}")
    floor = medians["copy"] + medians["repack"]
    table.add_row("one copy and the packing (lower bound of a sync)", f"{floor:.3f}")
    console.print(table)

    growth = measure_growth()
    table = Table(title="Growth: random Llamas, bfloat16")
    for column in ("model", "parameters", "sync, s", "stage, s", "send, s", "load, s", "ns per parameter"):
        table.add_column(column, justify="right")
    for name, row in growth.items():
        number = row["num_parameters"]
        cells = (f"{number / 1e6:.1f}M", *(f"{row[key]:.4f}" for key in ("sync", "stage_s", "send_s", "load_s")))
        table.add_row(name, *cells, f"{row['sync'] / number * 1e9:.2f}")
    console.print(table)

    deltas = measure_deltas(str(Path(ensure_embedded_model())))
    ratio = medians["sync"] / medians["checkpoint"]
    return {
        "name": "weight_sync",
        "ratio": ratio,
        "ratio_of": "seconds of a weight sync to those of saving a checkpoint and reloading it in the same engine",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": {
            **medians,
            "num_bytes": num_bytes,
            "stands_still": stands_still,
            "sync_to_copies_and_repack": medians["sync"] / allowed,
            "floor_to_checkpoint": floor / medians["checkpoint"],
            "growth": growth,
            "deltas": deltas,
        },
    }
