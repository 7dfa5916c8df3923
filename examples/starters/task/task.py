"""A task: problems, and a function that scores answers."""

from __future__ import annotations

import random

from llmrl import DatasetChatEnv, RubricReward

PROMPT = "Reply with the larger number only."


def problems(split: str) -> list[dict[str, str]]:
    """Return the problems: `query` is the question, other columns are for the reward. The splits share no problem."""
    pairs = [(a, b) for a in range(10) for b in range(10) if a != b]
    random.Random(0).shuffle(pairs)
    chosen = pairs[:70] if split == "train" else pairs[70:]
    return [{"query": f"{a} or {b}?", "larger": str(max(a, b))} for a, b in chosen]


def is_right(completion: str, larger: str) -> float:
    """Return 1 for a right answer, 0 otherwise. Arguments are the answer and columns of the problem, by name."""
    return float(completion.strip() == larger)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment; each prompt is answered `repeats` times, and the answers are compared."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    return asked.append_transform(RubricReward(is_right))
