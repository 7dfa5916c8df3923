"""Sending LoRA adapters or merged weights: bytes, seconds, speed of the engine, log-prob difference to the trainer.

The model is the embedded model in float32 with adapters of rank 16 on all linear layers of its blocks; each update
sends different adapters. vLLM has no CPU kernel for adapters (it copies both matrices for each token), so the speed of
the engine is not representative of a GPU.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmrl.engines import AsyncVLLM, Completion, SamplingConfig
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.trainer import LoRAConfig, load_model
from llmrl.weight_sync import VLLMWeightSyncScheme
from llmrl.weight_sync.adapters import AdapterWeights
from llmrl.weight_sync.source import ModelWeights

RANK, NUM_UPDATES, NUM_REQUESTS = 16, 7, 8
GOAL = 0.1
PROMPT = list(range(100, 140))
SAMPLING = SamplingConfig(max_new_tokens=32, ignore_eos=True)


def train_a_step(model: torch.nn.Module, seed: int) -> None:
    """Set the adapters to random values of the size that training produces."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_" in name:
                weight.copy_(0.01 * torch.randn(weight.shape, generator=generator))


def differences(model: torch.nn.Module, completions: list[Completion]) -> torch.Tensor:
    """Return the engine's log-probs minus those of peft's model, `[num_completions, num_tokens]`."""
    token_ids = torch.tensor([[*PROMPT, *one.token_ids] for one in completions])
    with torch.no_grad():
        log_probs = model(token_ids).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)
    own = log_probs.gather(2, token_ids[:, len(PROMPT) :, None])[:, :, 0]
    return torch.tensor([one.log_probs for one in completions]) - own


def measure(path: str, lora: Any) -> dict[str, float]:
    """Return the medians of one way of sending, with its own engine."""
    model = load_model(path, lora=LoRAConfig(rank=RANK)).eval()
    source = AdapterWeights(model) if lora == "adapter" else ModelWeights(model)
    num_bytes = sum(dtype.itemsize * torch.Size(shape).numel() for _, dtype, shape in source.metadata())
    with AsyncVLLM.from_pretrained(
        path,
        max_model_len=512,
        kv_cache_memory=1 << 28,
        weight_transfer="adapters" if lora == "adapter" else True,
        engine_args={"skip_tokenizer_init": True},
    ) as engine:
        sender = VLLMWeightSyncScheme(lora=lora).create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(engine=engine)
        rows = []
        for seed in range(NUM_UPDATES + 1):
            train_a_step(model, seed)
            started = time.perf_counter()
            sender.update_weights()
            rows.append({"update, s": time.perf_counter() - started, **sender.last_timings})
        started = time.perf_counter()
        completions = asyncio.run(_all(engine))
        rate = sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started)
        sender.shutdown()
    found = differences(model, completions).abs()
    medians = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    stands_still = 0.0 if lora == "adapter" else medians["update, s"] - medians["stage_s"]
    return {
        "bytes": float(num_bytes),
        "update, s": medians["update, s"],
        "of it copying, s": medians["stage_s"],
        "engine stands still, s": stands_still,
        "tokens a second": rate,
        "mean |log-prob difference|": found.mean().item(),
        "max |log-prob difference|": found.max().item(),
    }


async def _all(engine: AsyncVLLM) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(PROMPT, SAMPLING) for _ in range(NUM_REQUESTS))))


def run() -> dict[str, Any]:
    """Measure both ways of sending."""
    path = str(ensure_embedded_model())
    results = {lora: measure(path, lora) for lora in ("merged", "adapter")}
    table = Table(title=f"LoRA of rank {RANK}, median of {NUM_UPDATES} updates")
    for column in ("", *results):
        table.add_column(column, justify="right")
    for name in results["merged"]:
        table.add_row(name, *(f"{result[name]:.3g}" for result in results.values()))
    Console().print(table)
    ratio = results["adapter"]["bytes"] / results["merged"]["bytes"]
    return {
        "name": "adapters",
        "ratio": ratio,
        "ratio_of": "bytes of adapters to bytes of merged weights",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": results,
    }
