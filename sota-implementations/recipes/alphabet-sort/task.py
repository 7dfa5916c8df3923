"""Sorting three names, based on `alphabet-sort` of verifiers; the score is the share of pairs in order."""

from __future__ import annotations

import itertools
import random
from typing import Any

from llmrl import DatasetChatEnv, RewardFn, Rubric, RubricReward

NAMES = (
    "Anna", "Boris", "Clara", "David", "Emma", "Frank", "Greta", "Hugo", "Irene", "Jonas", "Karl", "Laura", "Maria",
    "Nora", "Oscar", "Paula", "Quinn", "Robert", "Sarah", "Thomas", "Ursula", "Victor", "Walter", "Xenia", "Yusuf",
    "Zoe",
)  # fmt: skip
PROMPT = "Sort the names alphabetically. Reply with the names only, separated by commas."


def problems(split: str) -> list[dict[str, Any]]:
    """Return triples of names in random order: 400 for training, and 50 others that are held out."""
    generator = random.Random(0)
    triples = generator.sample(list(itertools.combinations(NAMES, 3)), 450)
    chosen = triples[:400] if split == "train" else triples[400:]
    shuffled = [generator.sample(names, len(names)) for names in chosen]
    return [{"query": ", ".join(names), "names": names} for names in shuffled]


def pairs_in_order(completion: str, names: list[str]) -> float:
    """Return the share of pairs that are in order; 0 if an answer does not consist of exactly these names.

    In a random order, a pair is in order with probability one half, so a copy of the question scores 0.5 on average.
    """
    answer = [word.strip() for word in completion.strip().rstrip(".").split(",")]
    if sorted(answer) != sorted(names):
        return 0.0
    pairs = list(itertools.combinations(answer, 2))
    return sum(first < second for first, second in pairs) / len(pairs)


def is_sorted(completion: str, names: list[str]) -> float:
    """Return 1 if all names are there and in order."""
    return float(pairs_in_order(completion, names) == 1)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    rubric = Rubric(RewardFn(pairs_in_order), RewardFn(is_sorted, name="success", weight=0), truncation_reward=0.0)
    return asked.append_transform(RubricReward(rubric))


def conversations(count: int) -> list[dict[str, object]]:
    """Return the content of `sft.jsonl`: the first training problems with their right answers."""
    return [
        {
            "messages": [
                {"role": "system", "content": PROMPT},
                {"role": "user", "content": problem["query"]},
                {"role": "assistant", "content": ", ".join(sorted(problem["names"]))},
            ]
        }
        for problem in problems("train")[:count]
    ]
