"""One GRPO forward and backward pass with llmrl, a padded trainer, and the losses of TRL and TorchRL.

The batch has 16 prompts x 8 samples of SmolLM2-135M-Instruct in float32, on the CPU: short prompts that share an
instruction, and completions of 6 to 12 random tokens (real completions share more tokens). `padded` is the plain way:
pad the rows, 32 at a time, and compute the log-softmax of all logits. `ours` uses micro-batches of 256 packed tokens
and must meet both goals; `ours_whole` uses one micro-batch, and only its time matters.

Each case runs in its own processes, in rounds, so that a disturbance of the machine affects all cases. The floor of a
case is the resident memory before the first pass: the libraries, the weights in float32 and their gradients, which
every case needs. The memory cost of a case is the peak above the floor. `python -m benchmarks.loss CASE` runs one case.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from benchmarks.peak_memory import begin_peak, read_peak
from llmrl.trainer.packing.packed_rows import DEFAULT_TOKEN_BUDGET
from llmrl.trainer.transformers_wrapper import TransformersWrapper

NUM_PROMPTS, NUM_SAMPLES = 16, 8
NUM_ROWS_A_PADDED_BATCH = 32
NUM_ROUNDS = 2
NUM_REPEATS = 2
GOAL, MEMORY_GOAL = 0.4, 1 / 3
LEAN_TOKEN_BUDGET = 256


def _load() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from llmrl.testing.embedded_model import ensure_embedded_model

    folder = str(ensure_embedded_model())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _batch(tokenizer: Any) -> TensorDictBase:
    """Return rows of the calculator task with random advantages; the log-probs are zeros, to be written later."""
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


def _ours(
    model: Any, tokenizer: Any, batch: TensorDictBase, token_budget: int = LEAN_TOKEN_BUDGET
) -> Callable[[], float]:
    from llmrl.objectives import GRPOLoss

    policy = TransformersWrapper(model, generate=False, token_budget=token_budget)
    loss = GRPOLoss(policy, clip_epsilon=(1.0, 1e6))

    def step() -> float:
        total = 0.0
        inputs = loss.prepare(batch)
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
    """Return a pass of TorchRL's wrapper and loss, as its recipe uses them, with 32 padded rows at a time."""
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
        for part, weight in zip(parts, weights, strict=True):
            objective = loss(part.clone()).loss_objective.sum() * weight / sum(weights)
            objective.backward()
            total += float(objective.detach())
        return total

    return step


def _trl(model: Any, tokenizer: Any, batch: TensorDictBase) -> Callable[[], float]:
    """Return a pass of TRL's loss, as its `GRPOTrainer` computes it, without the trainer's generation."""
    import tempfile

    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer.pad_token = tokenizer.eos_token
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=NUM_ROWS_A_PADDED_BATCH,
        num_generations=NUM_SAMPLES,
        epsilon=1.0,
        epsilon_high=1e6,
        loss_type="dapo",
        gradient_checkpointing=False,
        report_to=[],
    )
    prompts = Dataset.from_dict({"prompt": ["-"] * NUM_ROWS_A_PADDED_BATCH})
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), config, prompts, processing_class=tokenizer
    )
    trainer.current_gradient_accumulation_steps = config.steps_per_generation
    rows = list(batch.unbind(0))
    num_trained = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)

    def pad(columns: list[torch.Tensor], side: str) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(columns, batch_first=True, padding_side=side)

    def inputs_of(part: list[TensorDictBase]) -> dict[str, torch.Tensor]:
        inputs = {}
        for name, side, is_completion in (("prompt", "left", False), ("completion", "right", True)):
            chosen = [row["masks", "all_assistant_mask"] == is_completion for row in part]
            ids = [row["tokens", "full"][mask] for row, mask in zip(part, chosen, strict=True)]
            inputs[f"{name}_ids"] = pad(ids, side)
            inputs[f"{name}_mask"] = pad([torch.ones_like(row) for row in ids], side)
        sampled = [row["log_probs", "full"][row["masks", "all_assistant_mask"]] for row in part]
        advantages = torch.cat([row["advantage"].reshape(1) for row in part])
        num_items = torch.tensor(float(num_trained))
        return {
            **inputs,
            "old_per_token_logps": pad(sampled, "right"),
            "advantages": advantages,
            "num_items_in_batch": num_items,
        }

    parts = [
        inputs_of(rows[start : start + NUM_ROWS_A_PADDED_BATCH])
        for start in range(0, len(rows), NUM_ROWS_A_PADDED_BATCH)
    ]

    def step() -> float:
        total = 0.0
        for part in parts:
            loss = trainer._compute_loss(model, part)
            loss.backward()
            total += float(loss.detach())
        return total

    return step


CASES = {
    "ours": _ours,
    "ours_whole": partial(_ours, token_budget=DEFAULT_TOKEN_BUDGET),
    "padded": _padded,
    "trl": _trl,
    "torchrl": _torchrl,
}


def run_case(name: str) -> dict[str, Any]:
    """Run a case in this process; return the seconds of each pass after a warm-up, and the memory."""
    model, tokenizer = _load()
    batch = _batch(tokenizer)
    with torch.no_grad():
        # On-policy: the ratio is 1 up to rounding, so that losses and gradients can be compared.
        TransformersWrapper(model, generate=False)(batch)
    model.set_attn_implementation("sdpa")
    step = CASES[name](model, tokenizer, batch)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    floor = begin_peak()
    seconds, processor_seconds, loss = [], [], 0.0
    for _ in range(1 + NUM_REPEATS):
        for parameter in model.parameters():
            parameter.grad.zero_()
        started, processor_started = time.perf_counter(), time.process_time()
        loss = step()
        seconds.append(time.perf_counter() - started)
        processor_seconds.append(time.process_time() - processor_started)
    gradient = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return {
        "seconds": seconds[1:],
        "processor_seconds": processor_seconds[1:],
        "floor_gib": floor,
        "peak_gib": read_peak(),
        "loss": loss,
        "grad_norm": float(gradient),
    }


def _run_apart(name: str) -> dict[str, Any] | None:
    """Run a case in its own process; return None if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", "benchmarks.loss", name],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    if process.returncode:
        print(f"{name}: skipped after an error: {process.stderr.strip().splitlines()[-1]}", flush=True)
        return None
    return json.loads(process.stdout.splitlines()[-1])


def run() -> dict[str, Any]:
    """Run every case, and compare."""
    names = list(CASES)
    if importlib.util.find_spec("trl") is None:
        print("trl: skipped because it is not installed (pip install --no-deps trl)")
        names.remove("trl")
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(NUM_ROUNDS):
        for name in list(runs):
            result = _run_apart(name)
            if result is None:
                del runs[name]
            else:
                runs[name].append(result)
    medians = {name: _medians(results) for name, results in runs.items()}
    columns = ["seconds", "processor_seconds", "floor_gib", "peak_gib", "above_floor_gib", "loss", "grad_norm"]
    print(f"{'case':11}" + "".join(f"{column:>17}" for column in columns))
    for name, result in medians.items():
        print(f"{name:11}" + "".join(f"{result[column]:17.4f}" for column in columns))
    ratio = medians["ours"]["seconds"] / medians["padded"]["seconds"]
    memory_ratio = medians["ours"]["above_floor_gib"] / medians["padded"]["above_floor_gib"]
    print(f"time {ratio:.3f} of the padded baseline's, goal {GOAL}")
    print(f"peak memory above the floor {memory_ratio:.3f} of the padded baseline's, goal {MEMORY_GOAL:.3f}")
    return {
        "name": "loss",
        "ratio": ratio,
        "ratio_of": "seconds of a forward and backward pass, llmrl to the padded trainer",
        "goal": GOAL,
        "memory_ratio": memory_ratio,
        "memory_goal": MEMORY_GOAL,
        "met": ratio <= GOAL and memory_ratio <= MEMORY_GOAL,
        "medians": medians,
    }


def _medians(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of each measure over all rounds, and the memory above the floor."""
    medians = {}
    for name in results[0]:
        values = [
            value for result in results for value in (result[name] if name.endswith("seconds") else [result[name]])
        ]
        medians[name] = statistics.median(values)
    medians["above_floor_gib"] = medians["peak_gib"] - medians["floor_gib"]
    return medians


if __name__ == "__main__":
    print(json.dumps(run_case(sys.argv[1])))
