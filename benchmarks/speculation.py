"""Tokens per second of an engine with n-gram drafts and of an engine without.

The engines are vLLM on the CPU with the embedded model in float32, one core for each engine, and 1 or 8 concurrent
requests. *repeated* requests a copy of a text in the prompt, greedily, so that most drafts are accepted. *sampled* is a
prompt without repetition at temperature 1, so that few drafts are accepted, and each draft costs its forward pass. The
engines alternate, three times.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.testing.embedded_model import ensure_embedded_model

NUM_TIMES, GOAL = 3, 1.5
TEXT = "The lighthouse keeper wrote the date, the wind and the names of seven ships in a book with a green cover. "
ASKED = {
    "repeated": (f"Copy this text:\n{TEXT}\n{TEXT}\n{TEXT}\nThe copy:\n", 0.0),
    "sampled": ("Write down what comes to your mind when you think of winter:\n", 1.0),
}


def tokens_per_second(engine: AsyncVLLM, prompt: list[int], temperature: float, num_requests: int) -> float:
    """Return the tokens per second of a batch of answers with 64 tokens."""
    sampling = SamplingConfig(max_new_tokens=64, temperature=temperature, ignore_eos=True)
    started = time.perf_counter()
    completions = engine.generate_batch([prompt] * num_requests, sampling)
    return sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started)


def run() -> dict[str, Any]:
    """Measure both engines, with each prompt and with one and eight requests."""
    from transformers import AutoTokenizer

    path = str(Path(ensure_embedded_model()))
    tokenizer = AutoTokenizer.from_pretrained(path)
    options: dict[str, Any] = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory": 1 << 28, "cpu_threads": 1}
    speeds: dict[str, list[float]] = {}
    accepted = {}
    with contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(AsyncVLLM.from_pretrained(path, speculative=speculative, **options))
            for name, speculative in (("plain", None), ("drafts", "ngram"))
        }
        for kind, (text, temperature) in ASKED.items():
            prompt = tokenizer(text)["input_ids"]
            for num_requests in (1, 8):
                for engine in engines.values():  # the first requests of an engine are slower
                    tokens_per_second(engine, prompt, temperature, num_requests)
                engines["drafts"].take_load()
                for _ in range(NUM_TIMES):
                    for name, engine in engines.items():
                        speed = tokens_per_second(engine, prompt, temperature, num_requests)
                        speeds.setdefault(f"{kind}, {num_requests} at once, {name}", []).append(speed)
                load = engines["drafts"].take_load()
                share = load.num_accepted_tokens / max(load.num_drafted_tokens, 1)
                accepted[f"{kind}, {num_requests} at once, share of drafts accepted"] = share
    medians = {name: statistics.median(values) for name, values in speeds.items()} | accepted
    for name, value in medians.items():
        print(f"{name:<55}{value:10.2f}")
    ratio = medians["repeated, 1 at once, drafts"] / medians["repeated, 1 at once, plain"]
    return {
        "name": "speculation",
        "ratio": ratio,
        "ratio_of": "tokens per second with drafts to those without, for one answer that repeats its prompt",
        "goal": GOAL,
        "met": ratio >= GOAL,
        "medians": medians,
    }
