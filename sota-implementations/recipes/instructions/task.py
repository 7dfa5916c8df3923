"""Short sentences that follow an instruction of a type from IFEval, judged by its checks; some topics are held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llmrl import DatasetChatEnv
from llmrl.envs.tasks.ifeval import IfEvalScorer

TOPICS = (
    "the sea", "a dog", "bread", "the moon", "a train", "winter", "music", "a garden", "rain", "a horse", "the city",
    "coffee", "a book", "the sun", "a river", "chess", "a bridge", "snow", "tea", "a forest", "the wind", "a cat",
    "apples", "a boat", "summer", "a school", "gold", "a bird", "the night", "cheese", "a clock", "a mountain",
)  # fmt: skip
NUM_HELD_OUT = 8
INSTRUCTIONS: Sequence[tuple[str, str, Mapping[str, object]]] = (
    ("Use lowercase letters only.", "change_case:english_lowercase", {}),
    ("Use capital letters only.", "change_case:english_capital", {}),
    ("Put the whole answer in double quotation marks.", "startend:quotation", {}),
    ("End with the exact words: Is that clear?", "startend:end_checker", {"end_phrase": "Is that clear?"}),
    ("Begin with a title in double angular brackets, such as <<title>>.", "detectable_format:title", {}),
)


def problems(split: str) -> list[dict[str, Any]]:
    """Return every topic of the split with every instruction; each problem also asks for the topic's last word."""
    topics = TOPICS[:-NUM_HELD_OUT] if split == "train" else TOPICS[-NUM_HELD_OUT:]
    return [
        {
            "query": f"Write one short sentence about {topic}, with that word in it. {text}",
            "instruction_id_list": [name, "keywords:existence"],
            "kwargs": [dict(arguments), {"keywords": [topic.split()[-1]]}],
        }
        for topic in topics
        for text, name, arguments in INSTRUCTIONS
    ]


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed)
    return asked.append_transform(IfEvalScorer(reasoning=False))
