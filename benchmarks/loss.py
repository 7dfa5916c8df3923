"""One GRPO forward and backward pass: ours beside a padded trainer and TorchRL's loss.

16 prompts x 8 samples of SmolLM2-135M-Instruct in bfloat16 autocast over float32 weights, on the CPU: short prompts
that share an instruction, completions of 6 to 12 random tokens (real ones repeat each other and share more). Each
case runs in a process of its own, for its peak memory. `padded` is the plain way: pad the rows, 32 at a time, take
the log-softmax of all logits. Cases: `python -m benchmarks.loss CASE`.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.policies.transformers_wrapper import TransformersWrapper

NUM_PROMPTS, NUM_SAMPLES = 16, 8
NUM_ROWS_A_PADDED_BATCH = 32
NUM_REPEATS = 3
GOAL = 0.4


def _load() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmrl.embedded_model import ensure_embedded_model

    folder = str(ensure_embedded_model())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _batch(tokenizer: Any) -> TensorDictBase:
    """Rows of the calculator task with random advantages; the sampler's log-probs are still to be written."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for prompt_index in range(NUM_PROMPTS):
        messages = [
            {"role": "system", "content": "You are a calculator. Reply with the number only."},
            {"role": "user", "content": f"{prompt_index % 10} + {prompt_index * 7 % 10} ="},
        ]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for sample_index in range(NUM_SAMPLES):
            num_completion = int(torch.randint(6, 13, (), generator=generator))
            completion = torch.randint(10, 49000, (num_completion,), generator=generator)
            ids = torch.cat([torch.tensor(prompt), completion])
            mask = torch.arange(len(ids)) >= len(prompt)
            row = {
                "tokens": {"full": ids},
                "masks": {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
                "log_probs": {"full": torch.zeros(len(ids))},
                "advantage": torch.randn(1, 1, generator=generator),
                "rollout": {"rollout_id": NonTensorData(f"{prompt_index}/{sample_index}")},
            }
            rows.append(TensorDict(row))
    return lazy_stack(rows, 0)


def _ours(model: Any, tokenizer: Any, batch: TensorDictBase) -> Callable[[], float]:
    from llmrl.objectives import GRPOLoss

    policy = TransformersWrapper(model, autocast_dtype=torch.bfloat16)
    loss = GRPOLoss(policy, clip_epsilon=(1.0, 1e6))

    def step() -> float:
        total = 0.0
        inputs = loss.prepare(batch)
        with policy.autocast():
            for micro in loss.micro_losses(inputs, batch):
                micro.total().backward()
                total += float(micro.total().detach())
        return total

    return step


def _padded(model: Any, tokenizer: Any, batch: TensorDictBase) -> Callable[[], float]:
    rows = list(batch.unbind(0))
    num_trained = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)

    def pad(rows: list[TensorDictBase], *key: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([row[key] for row in rows], batch_first=True)

    def step() -> float:
        total = 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for start in range(0, len(rows), NUM_ROWS_A_PADDED_BATCH):
                part = rows[start : start + NUM_ROWS_A_PADDED_BATCH]
                ids, mask = pad(part, "tokens", "full"), pad(part, "masks", "all_assistant_mask")[:, 1:]
                sampled, attention = pad(part, "log_probs", "full")[:, 1:], pad(part, "masks", "all_attention_mask")
                advantage = torch.stack([row["advantage"].reshape(1) for row in part])
                logits = model(input_ids=ids, attention_mask=attention.long(), use_cache=False).logits[:, :-1]
                log_probs = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
                objective = (log_probs - sampled).exp() * advantage
                loss = -(objective * mask).sum() / num_trained
                loss.backward()
                total += float(loss.detach())
        return total

    return step


def _torchrl(model: Any, tokenizer: Any, batch: TensorDictBase) -> Callable[[], float]:
    """TorchRL's wrapper and loss, as its own recipe uses them; the whole batch is one padded pass."""
    from torchrl.modules.llm import TransformersWrapper as TheirWrapper
    from torchrl.objectives.llm import GRPOLoss

    tokenizer.pad_token = tokenizer.eos_token
    actor = TheirWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, return_log_probs=True, pad_model_input=True
    )
    loss = GRPOLoss(actor, clip_epsilon=(0.999999, 1e6), entropy_bonus=False, masking_strategy="rlhf")
    rows = list(batch.unbind(0))
    parts = [
        lazy_stack([row.clone() for row in rows[start : start + NUM_ROWS_A_PADDED_BATCH]], 0)
        for start in range(0, len(rows), NUM_ROWS_A_PADDED_BATCH)
    ]
    weights = [sum(int(row["masks", "all_assistant_mask"].sum()) for row in part.unbind(0)) for part in parts]

    def step() -> float:
        total = 0.0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for part, weight in zip(parts, weights, strict=True):
                objective = loss(part.clone()).loss_objective.sum() * weight / sum(weights)
                objective.backward()
                total += float(objective.detach())
        return total

    return step


CASES = {"ours": _ours, "padded": _padded, "torchrl": _torchrl}


def run_case(name: str) -> dict[str, Any]:
    """Seconds of each pass after one to warm up, and peak memory, of one case in this process."""
    model, tokenizer = _load()
    batch = _batch(tokenizer)
    with torch.no_grad():
        # On-policy: the ratio is 1 up to bfloat16, so that losses and gradients can be compared.
        TransformersWrapper(model)(batch)
    model.set_attn_implementation("sdpa")
    step = CASES[name](model, tokenizer, batch)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, processor_seconds, loss = [], [], 0.0
    for _ in range(1 + NUM_REPEATS):
        model.zero_grad()
        started, processor_started = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - started)
        processor_seconds.append(time.process_time() - processor_started)
    gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {
        "seconds": statistics.median(seconds[1:]),
        "processor_seconds": statistics.median(processor_seconds[1:]),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "before_gib": before / 2**20,
        "loss": loss,
        "grad_norm": float(gradient),
    }


def run() -> dict[str, Any]:
    """Run every case and compare."""
    results: dict[str, dict[str, Any]] = {}
    for name in CASES:
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.loss", name],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
        )
        if process.returncode:
            print(f"{name}: skipped, it failed with: {process.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        results[name] = json.loads(process.stdout.splitlines()[-1])
    if importlib.util.find_spec("trl") is None:
        print("trl: skipped, it is not installed")
    print(f"{'case':10}{'seconds':>10}{'CPU s':>10}{'peak GiB':>10}{'loss':>12}{'grad norm':>12}")
    for name, result in results.items():
        print(
            f"{name:10}{result['seconds']:10.2f}{result['processor_seconds']:10.2f}{result['peak_gib']:10.2f}"
            f"{result['loss']:12.5f}{result['grad_norm']:12.5f}"
        )
    ratio = results["ours"]["seconds"] / results["padded"]["seconds"]
    return {
        "name": "loss",
        "ratio": ratio,
        "ratio_of": "seconds of a forward and backward pass, ours to padded",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": results,
    }


if __name__ == "__main__":
    print(json.dumps(run_case(sys.argv[1])))
