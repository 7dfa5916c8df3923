"""Seconds of a weight sync, beside a checkpoint saved and reloaded, and beside one copy in memory.

TorchRL 0.14.1 cannot update a vLLM 0.32 engine on CPU, so that its files are compared and the rest is left out:

- its receiver asks the workers for `load_weights_from_storage`, which none of vLLM's has (`NotImplementedError`);
- where it calls the model's `load_weights` itself, that finds the parameters that vLLM packed and emptied
  (`AttributeError: 'Parameter' object has no attribute 'weight_loader'`);
- its own asynchronous engine asks Ray for GPUs, and its other scheme for NCCL.

No sync can cost less than one copy and the packing that vLLM's CPU kernels need, which it does again for each matrix:
that floor is printed beside the goal, which it does not reach on every machine.

Deltas are of true steps of AdamW, beside all weights, in bytes and in seconds: through files, and by gloo to a process
on this host. There a broadcast of all costs little more than a copy, so that deltas save bytes, and seconds only where
few words changed. Engines wait for reading and sending, and for neither writing nor packing.
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
"""Of the time that a checkpoint takes: saved to a folder in page cache, and reloaded by vLLM itself."""
GROWTH = {"2M": (128, 4, 8192), "20M": (384, 8, 16384), "100M": (768, 12, 32768), "360M": (1024, 24, 49152)}
"""Random llamas: hidden size, layers, vocabulary."""
TITLES = {
    "sync": "sync, all of it",
    "stage_s": "  pack and cast (the engine generates)",
    "pause_s": "  pause",
    "send_s": "  send and check (the engine waits)",
    "load_s": "  load, empty the prefix cache (the engine waits)",
    "resume_s": "  resume",
    "copy": "copy the same bytes once",
    "repack": "pack each matrix anew, as vLLM's kernels need it",
    "checkpoint": "save a checkpoint, reload it",
    "double_buffer": "sync through files (double buffer)",
    "torchrl_files": "torchrl's double buffer: write and read its files",
}


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """Of each column; the first two rows touch both buffers for the first time and are left out."""
    return {name: statistics.median(row[name] for row in rows[2:]) for name in rows[0]}


def start(path: str) -> AsyncVLLM:
    """An engine that serves nothing else."""
    return AsyncVLLM.from_pretrained(
        path,
        max_model_len=512,
        dtype="bfloat16",
        kv_cache_memory=1 << 28,
        engine_args={"skip_tokenizer_init": True},
    )


def make_repack(model: torch.nn.Module) -> Callable[[], None]:
    """Packs matrices of the engine's shapes (fused as a llama's are) as vLLM does when it loads them."""
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
    """What torchrl's scheme does up to vLLM: it writes its files and reads them; see the module for the rest."""
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
    """Medians of the model in `path`, and the bytes of its weights as sent."""
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
        # In turn, so that a busy moment of the machine meets all alike.
        for _ in range(NUM_REPEATS + 2):
            model.to(torch.float32)
            row = {"sync": seconds_of(sender.update_weights), **sender.last_timings}
            row["copy"] = seconds_of(lambda: target.copy_(source))
            row["repack"] = seconds_of(repack)
            row["checkpoint"] = seconds_of(by_checkpoint)
            rows.append(row)
        sender.shutdown()

        # An engine follows one sender at a time.
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
    """Seconds of a sync by size of a random model."""
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
    """Measure the embedded model, then random ones of growing size, then what true steps change."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    medians, num_bytes = measure(str(Path(ensure_embedded_model())))
    console = Console()
    table = Table(title=f"One weight sync of {num_bytes / 1e6:.0f} MB, median of {NUM_REPEATS}")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    for name, title in TITLES.items():
        table.add_row(title, f"{medians[name]:.3f}")
    allowed = 3 * medians["copy"] + medians["repack"]
    stands_still = medians["sync"] - medians["stage_s"]
    table.add_row("engine stands still", f"{stands_still:.3f}")
    table.add_row("3 copies and the packing (the sync should cost no more)", f"{allowed:.3f}")
    floor = medians["copy"] + medians["repack"]
    table.add_row("one copy and the packing (no sync can cost less)", f"{floor:.3f}")
    console.print(table)

    growth = measure_growth()
    table = Table(title="Growth: random llamas, bfloat16")
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
        "ratio_of": "a weight sync to saving a checkpoint and reloading it in the same engine",
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
