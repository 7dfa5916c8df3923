"""Peak memory of selected log-probs, forward and backward, in chunks and with all logits, by vocabulary and length.

Hidden states and head are random, in float32. Each measurement runs in its own process; the peak counts above the
memory of inputs and their gradients, which both ways need. The naive way holds several tensors
`[num_tokens, vocab_size]`. In chunks the memory does not grow with the number of tokens, and grows with the vocabulary
only as the gradient of the head does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import begin_peak, read_peak
from llmrl.trainer.head.log_probs import chunked_log_probs

HIDDEN_SIZE = 256
SIZES = [(2048, 16384), (4096, 16384), (8192, 16384), (2048, 32768), (2048, 65536)]
"""(num_tokens, vocab_size)."""
GOAL = 1 / 3


def _naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def _chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunked_log_probs(hidden, weight, targets)[0]


CASES = {"chunked": _chunked, "naive": _naive}


def run_case(name: str, num_tokens: int, vocab_size: int) -> dict[str, float]:
    """Return the peak in GiB above inputs and gradients, and values to compare both cases."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, HIDDEN_SIZE, generator=generator).mul_(0.3).requires_grad_()
    weight = torch.randn(vocab_size, HIDDEN_SIZE, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    # A small first pass, so that the libraries load their kernels.
    CASES[name](hidden[:2], weight[:8], targets[:2] % 8).sum().backward()
    floor = begin_peak()
    log_probs = CASES[name](hidden, weight, targets)
    log_probs.mean().backward()
    peak = read_peak()
    return {
        "above_floor_gib": peak - floor,
        "log_prob": float(log_probs.detach().mean()),
        "grad_norm": float(weight.grad.norm() + hidden.grad.norm()),
    }


def run() -> dict[str, Any]:
    """Measure every case at every size."""
    results: dict[str, dict[str, float]] = {}
    print(f"{'tokens':>8}{'vocabulary':>12}" + "".join(f"{name + ' GiB':>14}" for name in CASES) + f"{'ratio':>8}")
    for num_tokens, vocab_size in SIZES:
        held: dict[str, dict[str, float]] = {}
        for name in CASES:
            process = subprocess.run(
                [sys.executable, "-m", "benchmarks.log_prob_memory", name, str(num_tokens), str(vocab_size)],
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                check=True,
            )
            held[name] = json.loads(process.stdout.splitlines()[-1])
        chunked, naive = held["chunked"], held["naive"]
        for number in ("log_prob", "grad_norm"):
            if abs(chunked[number] - naive[number]) > 1e-4 * abs(naive[number]):
                raise AssertionError(f"chunked and naive disagree on {number}: {held}")
        ratio = chunked["above_floor_gib"] / naive["above_floor_gib"]
        results[f"{num_tokens}x{vocab_size}"] = {
            **{name: value["above_floor_gib"] for name, value in held.items()},
            "ratio": ratio,
        }
        print(
            f"{num_tokens:8}{vocab_size:12}"
            + "".join(f"{value['above_floor_gib']:14.3f}" for value in held.values())
            + f"{ratio:8.3f}",
            flush=True,
        )
    worst = max(result["ratio"] for result in results.values())
    return {
        "name": "log_prob_memory",
        "ratio": worst,
        "ratio_of": "peak memory of log-probs and their gradient, in chunks to all logits, worst size",
        "goal": GOAL,
        "met": worst <= GOAL,
        "medians": results,
    }


if __name__ == "__main__":
    print(json.dumps(run_case(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
