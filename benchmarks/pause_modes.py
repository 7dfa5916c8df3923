"""Cost of a weight update for requests in flight, by `pause_mode` and `reset_running_requests`.

vLLM on the CPU serves the embedded model in float32 to eight conversations, which repeatedly request 32 tokens with a
new prompt. Four updates through shared memory follow each other at intervals of a second, many times as often as in a
run. *Stands still* is the time from pause to resumption, without new tokens. *Tokens per s* counts tokens during the
updates, compared with the same time without updates. With `keep` and the reset, contexts are computed again with the
new weights. Without the reset, the contexts of old weights remain, and later tokens are computed from both. With
`wait`, the update starts when the requests have ended. With `abort`, requests end with the tokens so far; the collector
then continues with a new request, which is not counted as a loss.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.engines.base import PauseMode
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata

NUM_CONVERSATIONS, NUM_PROMPT_TOKENS, NUM_UPDATES, APART_S = 8, 256, 4, 1.0
SAMPLING = SamplingConfig(max_new_tokens=32, ignore_eos=True)
WAYS: dict[str, tuple[PauseMode, bool]] = {
    "keep, contexts are read again": ("keep", True),
    "keep, contexts stay": ("keep", False),
    "wait": ("wait", True),
    "abort": ("abort", True),
}
GOAL = 0.2


async def measure(engine: AsyncVLLM, update: Any) -> dict[str, float]:
    """Measure conversations while `update()` is called several times; it returns the seconds of its parts."""
    num_tokens, is_over = 0, False

    async def converse(index: int) -> None:
        nonlocal num_tokens
        turn = 0
        while not is_over:
            turn += 1
            prompt_ids = [(index * 997 + turn * 131 + place) % 49000 for place in range(NUM_PROMPT_TOKENS)]
            completion = await engine.generate(prompt_ids, SAMPLING)
            num_tokens += len(completion.token_ids)

    talks = [asyncio.create_task(converse(index)) for index in range(NUM_CONVERSATIONS)]
    await asyncio.sleep(APART_S)
    num_before, started = num_tokens, time.perf_counter()
    parts = []
    for _ in range(NUM_UPDATES):
        parts.append(await asyncio.to_thread(update))
        await asyncio.sleep(APART_S)
    is_over = True
    await asyncio.gather(*talks)
    seconds = time.perf_counter() - started
    medians = {name: statistics.median(part[name] for part in parts) for name in parts[0]}
    return {"tokens_per_s": (num_tokens - num_before) / seconds, **medians}


def run() -> dict[str, Any]:
    """Measure each way in sequence, on one engine."""
    from transformers import AutoModelForCausalLM

    path = str(Path(ensure_embedded_model()))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine_args = {"skip_tokenizer_init": True}
    results: dict[str, dict[str, float]] = {}
    with AsyncVLLM.from_pretrained(
        path, max_model_len=512, dtype="float32", kv_cache_memory=1 << 28, engine_args=engine_args
    ) as engine:

        def rest() -> dict[str, float]:
            time.sleep(APART_S)
            return {}

        asyncio.run(measure(engine, rest))  # the first requests of an engine are slower
        results["no updates"] = asyncio.run(measure(engine, rest))
        for name, (mode, resets) in WAYS.items():
            sender = VLLMWeightSyncScheme(pause_mode=mode, reset_running_requests=resets).create_sender()
            sender.register_model(model)
            sender.init_all_workers_group(get_model_metadata(model), engine)

            def update(sender: Any = sender) -> dict[str, float]:
                sender.update_weights()
                timings = sender.last_timings
                stands = sum(timings[part] for part in ("pause_s", "send_s", "load_s", "resume_s"))
                return {"stands_still_s": stands, "pause_s": timings["pause_s"]}

            results[name] = asyncio.run(measure(engine, update))
            sender.shutdown()
    table = Table(title=f"{NUM_UPDATES} updates, {NUM_CONVERSATIONS} requests in flight")
    for column in ("way", "tokens per s", "stands still, s", "of which pause, s"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for name, row in results.items():
        cells = (f"{row[key]:.3f}" if key in row else "" for key in ("tokens_per_s", "stands_still_s", "pause_s"))
        table.add_row(name, *cells)
    Console().print(table)
    ratio = results["keep, contexts are read again"]["tokens_per_s"] / results["keep, contexts stay"]["tokens_per_s"]
    return {
        "name": "pause_modes",
        "ratio": ratio,
        "ratio_of": "tokens per second with contexts computed again at each update to those with old contexts",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "medians": results,
    }
