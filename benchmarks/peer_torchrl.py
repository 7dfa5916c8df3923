"""Training on one-digit sums with TorchRL's environment, collector, wrapper, advantage and GRPO loss, for `peers`.

python benchmarks/peer_torchrl.py TASK PROBLEMS LOG
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.envs.transforms import Transform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM, AutoTokenizer

MICRO_BATCH_SIZE = 32
"""Number of answers in a padded micro-batch, as in the plain loop."""


class AllLogProbs(TransformersWrapper):
    """TorchRL's wrapper, with the log-probs of all sampled tokens.

    When it generates, TorchRL 0.14 sets the log-prob of the first token to 0. One-digit answers have only one such
    token, and with a ratio of p instead of 1 the model learns nothing.
    """

    @classmethod
    def _log_probs_generate(cls, tokens: Any, logits: Any, pad_val: int = -100, pad: bool = True) -> Any:
        assert not pad
        log_probs = torch.nn.functional.cross_entropy(logits.mT, tokens, reduction="none").neg()
        return log_probs, logits


class RightNumber(Transform):
    """Ends a conversation after its answer, with reward 1 for a complete answer with the right number."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        answers = tensordict["text", "response"]
        rewards = [
            float(text.endswith(self.end) and re.findall(r"\d+", text)[-1:] == [right])
            for text, right in zip(answers, tensordict["answer"], strict=True)
        ]
        done = torch.ones(len(rewards), 1, dtype=torch.bool)
        next_tensordict.update({"reward": torch.tensor(rewards).view(-1, 1, 1), "done": done, "terminated": done})
        return next_tensordict

    def _reset(self, tensordict: Any, tensordict_reset: Any) -> Any:
        return tensordict_reset

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        from torchrl.data import Unbounded

        reward_spec["reward"] = Unbounded(shape=(*self.parent.batch_size, 1, 1))
        return reward_spec


def main(task: dict[str, Any], problems: list[dict[str, str]], log: str) -> None:
    """Train until the target reward, and write measurements of each step to the log."""
    torch.manual_seed(task["seed"])
    random.seed(task["seed"])
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    tokenizer.pad_token_id = 0  # by default the end of a message, which would be removed as padding
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32).eval()
    batch_size = task["groups_per_batch"] * task["group_size"]
    micro_batch_size = min(MICRO_BATCH_SIZE, batch_size)

    def rows(items: list[dict[str, str]]) -> Any:
        return lazy_stack([TensorDict({"query": item["query"], "answer": item["answer"]}) for item in items])

    loader = DataLoader(problems, batch_size=task["groups_per_batch"], shuffle=True, drop_last=True, collate_fn=rows)
    env = TransformedEnv(
        ChatEnv(
            batch_size=(batch_size,),
            input_mode="history",
            tokenizer=tokenizer,
            system_prompt=problems[0]["system"],
            system_role="system",
        )
    )
    env.append_transform(
        DataLoadingPrimer(
            dataloader=loader, batch_size=(task["groups_per_batch"],), repeats=task["group_size"], group_repeats=True
        )
    )
    env.append_transform(RightNumber(tokenizer.eos_token))
    options = {"tokenizer": tokenizer, "pad_output": False, "return_log_probs": True}
    policy = AllLogProbs(
        model,
        generate=True,
        input_mode="history",
        generate_kwargs={
            "max_new_tokens": task["max_new_tokens"],
            "do_sample": True,
            "temperature": 1.0,
            "pad_token_id": tokenizer.pad_token_id,
            "top_k": len(tokenizer),  # no truncation: None is refused, and the default is 50
        },
        **options,
    )
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=batch_size, total_dialog_turns=batch_size * task["num_steps"]
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(batch_size),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=task["group_size"]),
        batch_size=micro_batch_size,
    )
    loss = GRPOLoss(TransformersWrapper(model, generate=False, input_mode="tokens", **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["learning_rate"], weight_decay=0.0)
    path = Path(log)
    path.write_text("")
    started = time.perf_counter()
    for batch in collector:
        generated = time.perf_counter()
        batch = batch.reshape(-1)
        rewards = batch["next", "reward"].flatten()
        for row in batch.unbind(0):  # the loss reads entries of all tokens, as they were sampled
            prompt, sampled = row["tokens", "prompt"], row["log_probs", "response"]
            row["tokens", "full"] = torch.cat([prompt, row["tokens", "response"]])
            row["log_probs", "full"] = torch.cat([sampled.new_zeros(len(prompt)), sampled])
            row["masks", "all_attention_mask"] = torch.ones_like(row["tokens", "full"], dtype=torch.bool)
        buffer.empty()
        buffer.extend(batch)
        num_micro_batches = -(-len(buffer) // micro_batch_size)
        for micro_batch in buffer:
            (loss(micro_batch).loss_objective / num_micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = time.perf_counter()
        measured = {
            "reward_mean": rewards.mean().item(),
            "seconds": done - started,
            "generate_seconds": generated - started,
            "train_seconds": done - generated,
            "num_generated": sum(len(row["tokens", "response"]) for row in batch.unbind(0)),
        }
        with path.open("a") as file:
            file.write(json.dumps(measured) + "\n")
        if measured["reward_mean"] >= task["target_reward"]:
            break
        started = time.perf_counter()
    collector.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), sys.argv[3])
