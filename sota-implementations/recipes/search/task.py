"""Questions about invented people, half of them with two hops, and a search tool over 60 documents."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from torchrl.envs import Compose

from llmrl import DatasetChatEnv, RewardFn, Rubric, RubricReward
from llmrl.data import Message
from llmrl.rendering.tool_calls import make_tool_call
from llmrl.tools import SearchIndex
from llmrl.transforms import ToolTransform

PROMPT = "Search before you answer. Reply with the name or the word only."
_FIRST = ("Ada", "Bruno", "Carla", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
_LAST = ("Adler", "Brandt", "Conti", "Duarte", "Egger", "Ferrari")
_FACTS = {
    "city": ("Oslo", "Porto", "Turin", "Lyon", "Gdansk", "Graz", "Bergen", "Malaga"),
    "job": ("baker", "pilot", "nurse", "carpenter", "teacher", "chemist", "gardener", "plumber"),
    "pet": ("parrot", "tortoise", "rabbit", "hamster", "goat", "canary", "ferret", "pony"),
}


@cache
def people() -> dict[str, dict[str, str]]:
    """Return the facts about 60 people by name; the friend of each person is another one of them."""
    generator = random.Random(0)
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    generator.shuffle(names)
    return {
        name: {"friend": names[place - 1], **{fact: generator.choice(values) for fact, values in _FACTS.items()}}
        for place, name in enumerate(names)
    }


def documents() -> list[dict[str, str]]:
    """Return a document about each person."""
    return [
        {"title": name, "text": f"{name} has the {', '.join(f'{fact} {value}' for fact, value in facts.items())}."}
        for name, facts in people().items()
    ]


def problems(split: str) -> list[dict[str, Any]]:
    """Return the questions about 45 people for training, or about the 15 others, with the searches that answer them."""
    rows = []
    for name in list(people())[:45] if split == "train" else list(people())[45:]:
        friend = people()[name]["friend"]
        for fact in _FACTS:
            one = {"query": f"What is the {fact} of {name}?", "answer": people()[name][fact]}
            two = {"query": f"What is the {fact} of the friend of {name}?", "answer": people()[friend][fact]}
            rows.append(one | {"searches": [name], "num_hops": 1})
            rows.append(two | {"searches": [name, friend], "num_hops": 2})
    random.Random(1).shuffle(rows)
    return rows


def is_right(completion: str, answer: str) -> float:
    """Return 1 if the last answer is only the right word."""
    return float(completion.strip().rstrip(".") == answer)


def num_searches(messages: Sequence[Message]) -> float:
    """Return the number of searches that found a document; a metric with weight 0 in the reward."""
    return float(sum(message["role"] == "tool" and "[1]" in str(message["content"]) for message in messages))


def index() -> SearchIndex:
    """Return the index of the documents; a search returns the best two."""
    return SearchIndex(documents(), num_results=2)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    rubric = Rubric(RewardFn(is_right), RewardFn(num_searches, weight=0), truncation_reward=0.0)
    return asked.append_transform(Compose(ToolTransform([index().tool()]), RubricReward(rubric)))


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the content of `sft.jsonl`: the first training questions as conversations with their searches."""
    tool = index().tool()
    chosen = []
    for row in problems("train")[:count]:
        messages = [{"role": "system", "content": PROMPT}, {"role": "user", "content": row["query"]}]
        for query in row["searches"]:
            call = make_tool_call(tool.name, {"query": query})
            found = asyncio.run(tool.run({"query": query}, ""))
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "content": found, "name": tool.name})
        messages.append({"role": "assistant", "content": row["answer"]})
        chosen.append({"messages": messages, "tools": [tool.schema]})
    return chosen
