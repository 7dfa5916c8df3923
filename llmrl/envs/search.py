"""Searching: a task of several turns with a tool, made up on the spot, so that it trains without a network."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Literal

from torchrl.envs import TransformedEnv

from llmrl.data import Message
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.rendering.tool_calls import make_tool_call
from llmrl.rewards import RewardFn, Rubric
from llmrl.transforms import RubricReward, SearchIndex, ToolTransform

_SYSTEM_PROMPT = (
    "Answer questions about people. You know nothing about them: call the search tool first, "
    "then reply with the answer only."
)
_FIRST = ("Ada", "Bruno", "Carla", "Dario", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas")
_LAST = ("Adler", "Brandt", "Conti", "Duarte", "Egger", "Ferrari", "Gruber", "Hansen", "Ivanov", "Jensen")
_FACTS = {
    "city": (
        "What is the city of {name}?",
        "The city of {name} is {value}.",
        ("Oslo", "Porto", "Turin", "Lyon", "Gdansk", "Graz", "Bergen", "Malaga"),
    ),
    "job": (
        "What is the job of {name}?",
        "The job of {name} is {value}.",
        ("baker", "pilot", "nurse", "carpenter", "teacher", "chemist", "gardener", "plumber"),
    ),
    "pet": (
        "What is the pet of {name}?",
        "The pet of {name} is a {value}.",
        ("parrot", "tortoise", "rabbit", "hamster", "goat", "canary", "ferret", "pony"),
    ),
}  # fmt: skip


def search_corpus(*, num_people: int = 60, seed: int = 0) -> tuple[list[str], list[dict[str, str]]]:
    """Documents about people that do not exist, and questions that they answer, each with its `answer`.

    Raises:
        ValueError: for fewer than two people, or more than there are names.

    Example:
        >>> documents, questions = search_corpus(num_people=2)
        >>> len(documents), len(questions), sorted(questions[0])
        (6, 6, ['answer', 'query'])
    """
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    if not 2 <= num_people <= len(names):
        raise ValueError(f"num_people must be between 2 and {len(names)}, got {num_people}.")
    generator = random.Random(seed)
    documents, questions = [], []
    for name in generator.sample(names, num_people):
        for question, statement, values in _FACTS.values():
            value = generator.choice(values)
            documents.append(statement.format(name=name, value=value))
            questions.append({"query": question.format(name=name), "answer": value})
    generator.shuffle(questions)
    return documents, questions


def is_answer_named(completion: str, answer: str) -> float:
    """1 when the answer is a word of the completion.

    Example:
        >>> is_answer_named("She lives in Oslo.", "Oslo"), is_answer_named("Oslofjord", "Oslo")
        (1.0, 0.0)
    """
    return float(re.search(rf"\b{re.escape(answer)}\b", completion, re.IGNORECASE) is not None)


def has_searched(messages: Sequence[Message]) -> float:
    """1 when a search since the question gave something.

    Example:
        >>> has_searched(({"role": "tool", "content": "[1] Ada lives in Oslo."},)), has_searched(())
        (1.0, 0.0)
    """
    for message in reversed(messages):
        if message["role"] == "tool" and str(message["content"]).startswith("[1]"):
            return 1.0
        if message["role"] == "user":
            break
    return 0.0


def example_conversation() -> tuple[Message, ...]:
    """A question about nobody in any corpus, searched for and answered: it shows a model how it is done.

    Example:
        >>> [message["role"] for message in example_conversation()]
        ['user', 'assistant', 'tool', 'assistant']
    """
    question, statement, _ = _FACTS["city"]
    query = question.format(name="Zoe Zimmer")
    return (
        {"role": "user", "content": query},
        {"role": "assistant", "content": "", "tool_calls": [make_tool_call("search", {"query": query})]},
        {"role": "tool", "content": f"[1] {statement.format(name='Zoe Zimmer', value='Rome')}", "name": "search"},
        {"role": "assistant", "content": "Rome"},
    )


def make_search_env(
    split: Literal["train", "test"] = "train",
    *,
    num_people: int = 60,
    num_results: int = 2,
    repeats: int = 1,
    search_weight: float = 0.2,
    has_example: bool = True,
    tool_parser: str = "none",
    seed: int = 0,
) -> TransformedEnv:
    """Questions whose answers only the search tool knows: question, search, answer.

    Two things are rewarded, the mean of them weighted: naming the answer in the last message (weight 1), and having
    searched with success (`search_weight`), which shows a small model the way.

    Args:
        split: three quarters of the questions are `train`, the rest `test`; both search the whole corpus.
        num_people: of whom the corpus tells three things each.
        num_results: documents that a search shows.
        repeats: conversations per question.
        search_weight: weight of a search that found something.
        has_example: whether every conversation begins with one that is searched and answered.
        tool_parser: see `ToolTransform`.
        seed: of the corpus and of the order.

    Raises:
        ValueError: for an unknown split.
        MissingExtraError: without the `tools` extra.

    Example:
        >>> data = make_search_env(has_example=False).reset()
        >>> data["history"].prompt.role, data["tools"][0]["function"]["name"]
        (['system', 'user'], 'search')
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    documents, questions = search_corpus(num_people=num_people, seed=seed)
    num_test = len(questions) // 4
    opening = example_conversation() if has_example else ()
    env = DatasetChatEnv(
        questions[:num_test] if split == "test" else questions[num_test:],
        repeats=repeats,
        shuffle=split == "train",
        seed=seed,
        name=split,
        system_prompt=_SYSTEM_PROMPT,
        prepare=lambda item: [*opening, {"role": "user", "content": item["query"]}],
    )
    rubric = Rubric(
        RewardFn(is_answer_named, name="answer"), RewardFn(has_searched, name="searched", weight=search_weight)
    )
    index = SearchIndex(documents, num_results=num_results)
    return env.append_transform(ToolTransform([index.tool()], tool_parser=tool_parser)).append_transform(
        RubricReward(rubric)
    )
