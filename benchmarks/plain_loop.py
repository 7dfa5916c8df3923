"""GRPO without a library: transformers' generate and a padded trainer, with which `demo_speed` compares."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from llmrl.envs.tasks.addition import AdditionEnv, is_last_number_right


def run_plain_loop(
    model_path: str,
    *,
    num_steps: int,
    target_reward: float,
    seed: int = 0,
    groups_per_batch: int = 16,
    group_size: int = 8,
    max_new_tokens: int = 12,
    learning_rate: float = 2e-5,
) -> list[dict[str, float]]:
    """Train until the mean reward reaches `target_reward`; return reward, seconds and sampled tokens of each step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    env = AdditionEnv(seed=seed)
    random.seed(seed)
    log: list[dict[str, float]] = []
    for _ in range(num_steps):
        started = time.perf_counter()
        items = [env.prompts.draw()[0] for _ in range(groups_per_batch)]
        chats = [list(env.opening_messages(item["query"])) for item in items for _ in range(group_size)]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        prompts = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            ids = model.generate(
                **prompts, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens
            )
        generated = time.perf_counter()
        completions = ids[:, prompts["input_ids"].shape[1] :]
        mask, rewards = _score(completions, items, group_size, tokenizer)
        advantages = rewards.view(groups_per_batch, group_size)
        advantages = (advantages - advantages.mean(1, keepdim=True)) / (advantages.std(1, keepdim=True) + 1e-6)
        _update(model, optimizer, ids, prompts["attention_mask"], mask, advantages.flatten())
        done = time.perf_counter()
        log.append(
            {
                "reward_mean": rewards.mean().item(),
                "generate_seconds": generated - started,
                "train_seconds": done - generated,
                "seconds": done - started,
                "num_generated": mask.sum().item(),
            }
        )
        if log[-1]["reward_mean"] >= target_reward:
            break
    return log


def _score(
    completions: torch.Tensor, items: list[Any], group_size: int, tokenizer: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask of sampled tokens, including the end of the turn, and the reward of each row."""
    is_end = completions == tokenizer.eos_token_id
    mask = (is_end.cumsum(1) - is_end.long()) == 0
    rewards = torch.zeros(len(completions))
    for row, (ids, kept) in enumerate(zip(completions, mask, strict=True)):
        if bool((ids[kept] == tokenizer.eos_token_id).any()):
            text = tokenizer.decode(ids[kept], skip_special_tokens=True)
            rewards[row] = is_last_number_right(text, items[row // group_size]["answer"])
    return mask, rewards


def _update(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    mask: torch.Tensor,
    advantages: torch.Tensor,
    micro_batch_size: int = 32,
) -> None:
    optimizer.zero_grad()
    attention = torch.cat([prompt_mask, mask.long()], 1)
    num_prompt_tokens, num_tokens = prompt_mask.shape[1], mask.sum()
    for rows in torch.arange(len(ids)).split(micro_batch_size):
        logits = model(input_ids=ids[rows], attention_mask=attention[rows]).logits
        log_probs = logits[:, num_prompt_tokens - 1 : -1].float().log_softmax(-1)
        log_probs = log_probs.gather(-1, ids[rows, num_prompt_tokens:, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -(ratio * advantages[rows, None] * mask[rows]).sum() / num_tokens
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
