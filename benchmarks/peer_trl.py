"""Training on one-digit sums with TRL's `GRPOTrainer`, for `peers`; runs in its own process without llmrl.

python benchmarks/peer_trl.py TASK PROBLEMS LOG
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH_SIZE = 32
"""Number of answers in a padded micro-batch, as in the plain loop."""


class StepLog(TrainerCallback):
    """Writes a line per step, and ends the training at the target reward."""

    def __init__(self, path: str, target_reward: float, batch_size: int) -> None:
        self.path, self.target_reward, self.batch_size = Path(path), target_reward, batch_size
        self.path.write_text("")
        self.generate_seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.started, self.generate_seconds = time.perf_counter(), 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "reward" not in logs:
            return
        row = {
            "reward_mean": logs["reward"],
            "seconds": self.seconds,
            "generate_seconds": self.generate_seconds,
            "train_seconds": self.seconds - self.generate_seconds,
            "num_generated": logs["completions/mean_length"] * self.batch_size,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if logs["reward"] >= self.target_reward:  # never set to False, because TRL sets it after the last step
            control.should_training_stop = True


def main(task: dict[str, Any], problems: list[dict[str, str]], log: str) -> None:
    """Train until the target reward, and write measurements of each step to the log."""
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")

    def is_right(completions: Any, answer: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        return [
            float(tokenizer.eos_token_id in ids and re.findall(r"\d+", text)[-1:] == [right])
            for text, right, ids in zip(texts, answer, completion_ids, strict=True)
        ]

    rows = [
        {
            "prompt": [{"role": "system", "content": row["system"]}, {"role": "user", "content": row["query"]}],
            "answer": row["answer"],
        }
        for row in problems
    ]
    batch_size = task["groups_per_batch"] * task["group_size"]
    micro_batch_size = min(MICRO_BATCH_SIZE, batch_size)
    steps = StepLog(log, task["target_reward"], batch_size)
    trainer = GRPOTrainer(
        model=task["model"],
        reward_funcs=is_right,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows),
        callbacks=[steps],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            model_init_kwargs={"dtype": torch.float32},
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=batch_size // micro_batch_size,
            num_generations=task["group_size"],
            max_completion_length=task["max_new_tokens"],
            learning_rate=task["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_steps=task["num_steps"],
            seed=task["seed"],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
    )
    generate = trainer.model.generate

    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            steps.generate_seconds += time.perf_counter() - started

    trainer.model.generate = timed
    trainer.train()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
