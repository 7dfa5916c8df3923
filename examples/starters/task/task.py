"""A task: what is asked, and how good an answer is."""

from __future__ import annotations

import random

from llmrl import DatasetChatEnv, RubricReward

PROMPT = "Reply with the larger number only."


def problems(split: str) -> list[dict[str, str]]:
    """What is asked, as `query`, and columns for the reward. The splits share no problem."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:70] if split == "train" else pairs[70:]
    return [{"query": f"{a} or {b}?", "larger": str(max(a, b))} for a, b in chosen]


def is_right(completion: str, larger: str) -> float:
    """Score an answer: 1 is right. It reads the answer, and columns of the problem by their names."""
    return float(completion.strip() == larger)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """The environment; a prompt is answered `repeats` times, and the answers are compared."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    return asked.append_transform(RubricReward(is_right))
