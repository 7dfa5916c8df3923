"""CPU time and peak memory of the output head with and without the candidates that truncated sampling kept.

The forward and backward pass of random hidden states and a random head in float32, with a vocabulary of 49,152. Each
token has 20 candidates, as with top-k 20, or 200. Each measurement runs in its own process; memory is counted above
that of the inputs and their gradients.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import begin_peak, read_peak
from llmrl.data.sampling_mask import SamplingMask
from llmrl.trainer.head.log_probs import chunked_log_probs
from llmrl.trainer.head.truncated import truncated_log_probs

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE, NUM_TIMES = 1024, 49_152, 576, 5
CASES = {"none": 0, "20": 20, "200": 200}
"""Number of candidate ids per token; 0 for the head without candidates."""
GOAL = 1.2


def run_case(num_kept: int) -> dict[str, float]:
    """Return the median CPU seconds, and the peak memory in GiB above inputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=generator).mul_(0.3).requires_grad_()
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB_SIZE - num_kept, (NUM_TOKENS,), generator=generator)
    kept = [array("i", range(target, target + num_kept)) if num_kept else None for target in targets.tolist()]
    mask, positions = SamplingMask.of(kept), torch.arange(NUM_TOKENS)

    def step() -> None:
        hidden.grad = weight.grad = None
        if num_kept:
            log_probs, _ = truncated_log_probs(hidden, weight, targets, sampling_mask=mask, positions=positions)
        else:
            log_probs, _ = chunked_log_probs(hidden, weight, targets)
        log_probs.mean().backward()

    step()
    hidden.grad = weight.grad = None
    floor = begin_peak()
    seconds = []
    for _ in range(NUM_TIMES):
        started = time.process_time()
        step()
        seconds.append(time.process_time() - started)
    return {"seconds": statistics.median(seconds), "gib": read_peak() - floor}


def run() -> dict[str, Any]:
    """Measure every case twice, alternately."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for name in [*CASES, *reversed(CASES)]:
        command = [sys.executable, "-m", "benchmarks.sampling_replay", str(CASES[name])]
        process = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True)
        measured[name].append(json.loads(process.stdout.splitlines()[-1]))
    medians = {
        name: {number: statistics.mean(one[number] for one in runs) for number in ("seconds", "gib")}
        for name, runs in measured.items()
    }
    print(f"{'kept':>6}{'seconds':>10}{'ratio':>8}{'GiB':>8}{'ratio':>8}")
    ratios = []
    for name, values in medians.items():
        pair = [values[number] / medians["none"][number] for number in ("seconds", "gib")]
        ratios += pair
        print(f"{name:>6}{values['seconds']:10.2f}{pair[0]:8.2f}{values['gib']:8.3f}{pair[1]:8.2f}")
    worst = max(ratios)
    return {
        "name": "sampling_replay",
        "ratio": worst,
        "ratio_of": "CPU seconds or memory of the head with candidates to those without, the largest ratio",
        "goal": GOAL,
        "met": worst <= GOAL,
        "medians": medians,
    }


if __name__ == "__main__":
    print(json.dumps(run_case(int(sys.argv[1]))))
