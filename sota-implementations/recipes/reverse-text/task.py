"""Reversal of five letters, based on `reverse-text` of verifiers; the score is the similarity to the right answer."""

from __future__ import annotations

import difflib
import random
import string
from typing import Any

from llmrl import DatasetChatEnv, RewardFn, Rubric, RubricReward

PROMPT = "Write the letters in reverse order. Reply with the letters only, with spaces between them."


def problems(split: str) -> list[dict[str, Any]]:
    """Return texts of five different letters: 400 for training, and 50 others that are held out."""
    generator = random.Random(0)
    texts = list(dict.fromkeys(" ".join(generator.sample(string.ascii_lowercase, 5)) for _ in range(500)))[:450]
    chosen = texts[:400] if split == "train" else texts[400:]
    return [{"query": text, "answer": text[::-1]} for text in chosen]


def similarity(completion: str, answer: str) -> float:
    """Return the share of the characters that match in order (`difflib`)."""
    return difflib.SequenceMatcher(None, completion.strip(), answer).ratio()


def is_reversed(completion: str, answer: str) -> float:
    """Return 1 if the answer is exactly right."""
    return float(completion.strip() == answer)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    rubric = Rubric(RewardFn(similarity), RewardFn(is_reversed, name="success", weight=0), truncation_reward=0.0)
    return asked.append_transform(RubricReward(rubric))


def conversations(count: int) -> list[dict[str, object]]:
    """Return the content of `sft.jsonl`: the first training problems with their right answers."""
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
