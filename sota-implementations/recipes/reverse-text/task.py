"""Five letters in reverse order, after the environment `reverse-text` of verifiers; the score is its similarity."""

from __future__ import annotations

import difflib
import random
import string
from typing import Any

from llmrl import DatasetChatEnv, RewardFn, Rubric, RubricReward

PROMPT = "Write the letters in reverse order. Reply with the letters only, with spaces between them."


def problems(split: str) -> list[dict[str, Any]]:
    """Return five different letters each. The 400 problems for training and the 50 held out have no text in common."""
    generator = random.Random(0)
    texts = list(dict.fromkeys(" ".join(generator.sample(string.ascii_lowercase, 5)) for _ in range(500)))[:450]
    chosen = texts[:400] if split == "train" else texts[400:]
    return [{"query": text, "answer": text[::-1]} for text in chosen]


def similarity(completion: str, answer: str) -> float:
    """Return the share of the characters that match in order, by `difflib`."""
    return difflib.SequenceMatcher(None, completion.strip(), answer).ratio()


def is_reversed(completion: str, answer: str) -> float:
    """Return 1 if the answer is right to the letter."""
    return float(completion.strip() == answer)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Make the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    rubric = Rubric(RewardFn(similarity), RewardFn(is_reversed, name="success", weight=0), truncation_reward=0.0)
    return asked.append_transform(RubricReward(rubric))


def conversations(count: int) -> list[dict[str, object]]:
    """Return the first problems for training with their right answers, which `sft.jsonl` holds."""
    return [
        {
            "messages": [
                {"role": "system", "content": PROMPT},
                {"role": "user", "content": problem["query"]},
                {"role": "assistant", "content": problem["answer"]},
            ]
        }
        for problem in problems("train")[:count]
    ]
