"""Seconds of a weight sync, beside a checkpoint saved and reloaded, and beside one copy in memory."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmrl.embedded_model import ensure_embedded_model
from llmrl.engines import AsyncVLLM
from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata

NUM_REPEATS = 7
GOAL = 0.5
"""Of the time that a checkpoint takes: saved to a folder in page cache, and reloaded by vLLM itself."""


def seconds_of(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def run() -> dict[str, Any]:
    """Measure in turn, so that a busy moment of the machine meets all alike."""
    from transformers import AutoModelForCausalLM

    model_path = str(ensure_embedded_model())
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    metadata = get_model_metadata(model, torch.bfloat16)
    num_bytes = sum(dtype.itemsize * shape.numel() for dtype, shape in metadata.values())
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.zeros_like(source)

    rows: list[dict[str, float]] = []
    with AsyncVLLM.from_pretrained(model_path, max_model_len=512, kv_cache_memory=1 << 28) as engine:
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(metadata, engine)

        with tempfile.TemporaryDirectory() as folder:

            def by_checkpoint() -> None:
                model.to(torch.bfloat16).save_pretrained(folder)
                engine.pause("keep", clear_cache=False)
                reload = engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
                engine._background.run(reload)
                engine.reset_prefix_cache()
                engine.resume()

            for repeat in range(NUM_REPEATS + 2):
                model.to(torch.float32)
                row = {"sync": seconds_of(sender.update_weights), **sender.last_timings}
                row["checkpoint"] = seconds_of(by_checkpoint)
                row["copy"] = seconds_of(lambda: target.copy_(source))
                if repeat >= 2:  # the first two touch both buffers for the first time
                    rows.append(row)
        sender.shutdown()

    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratio = medians["sync"] / medians["checkpoint"]
    table = Table(title=f"One weight sync of {num_bytes / 1e6:.0f} MB, median of {NUM_REPEATS}")
    table.add_column("what")
    table.add_column("seconds", justify="right")
    titles = {
        "sync": "sync, all of it",
        "stage_s": "  pack and cast (the engine generates)",
        "pause_s": "  pause",
        "send_s": "  send and check (the engine waits)",
        "load_s": "  load, empty the prefix cache (the engine waits)",
        "resume_s": "  resume",
        "checkpoint": "save a checkpoint, reload it",
        "copy": "copy the same bytes once",
    }
    for name, title in titles.items():
        table.add_row(title, f"{medians[name]:.3f}")
    table.add_row("engine stands still", f"{medians['sync'] - medians['stage_s']:.3f}")
    Console().print(table)
    return {
        "name": "weight_sync",
        "ratio": ratio,
        "ratio_of": "a weight sync to saving a checkpoint and reloading it in the same engine",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": {**medians, "num_bytes": num_bytes, "sync_to_copy": medians["sync"] / medians["copy"]},
    }
