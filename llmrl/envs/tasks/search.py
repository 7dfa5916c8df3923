"""Search: a multi-turn task with a search tool over a generated corpus."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Unpack

from torchrl.envs import Compose

from llmrl.data import Message
from llmrl.envs.tasks.task import (
    Dataset,
    Split,
    TaskEnv,
    TaskOptions,
    named_task,
    part_of,
    refuse_generator_options,
    task_rows,
)
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
    """Return documents about `num_people` (2 to 100) fictional people, and questions (`query`, `answer`) about them.

    Example:
        >>> documents, questions = search_corpus(num_people=2)
        >>> len(documents), len(questions), sorted(questions[0])
        (6, 6, ['answer', 'query'])
    """
    names = [f"{first} {last}" for first in _FIRST for last in _LAST]
    if not 2 <= num_people <= len(names):
        raise ValueError(f"num_people must be between 2 and {len(names)}, got {num_people}.")
    generator = random.Random(seed)
    documents = []
    questions = []
    for name in generator.sample(names, num_people):
        for question, statement, values in _FACTS.values():
            value = generator.choice(values)
            documents.append(statement.format(name=name, value=value))
            questions.append({"query": question.format(name=name), "answer": value})
    generator.shuffle(questions)
    return documents, questions


def is_answer_named(completion: str, answer: str) -> float:
    """Return 1 if the answer occurs as a whole word in the completion, else 0.

    Example:
        >>> is_answer_named("She lives in Oslo.", "Oslo"), is_answer_named("Oslofjord", "Oslo")
        (1.0, 0.0)
        >>> is_answer_named("She writes C++.", "C++")
        1.0
    """
    return float(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", completion, re.IGNORECASE) is not None)


def has_searched(messages: Sequence[Message]) -> float:
    """Return 1 if a search since the last question returned a result, else 0.

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
    """Return an example with a search and an answer, about a person who is in no corpus."""
    question, statement, _ = _FACTS["city"]
    query = question.format(name="Zoe Zimmer")
    return (
        {"role": "user", "content": query},
        {"role": "assistant", "content": "", "tool_calls": [make_tool_call("search", {"query": query})]},
        {"role": "tool", "content": f"[1] {statement.format(name='Zoe Zimmer', value='Rome')}", "name": "search"},
        {"role": "assistant", "content": "Rome"},
    )


class SearchEnv(TaskEnv):
    """Questions that can only be answered with the search tool.

    The reward is the mean of naming the answer in the last message (weight 1) and of a successful search (0.2).

    Args:
        dataset: questions with the columns `query`, `answer` and `documents` (texts); searches
            cover the documents of all rows. By default `search_corpus`.
        split: `train` has three quarters of the generated questions, `test` the rest; both search the whole corpus.
        num_people: number of people in the generated corpus, which has three facts about each; 60 by default.
        num_results: number of documents that a search returns.
        show_example: whether every conversation begins with an example.
        **options: see `TaskOptions`; by default `train` is shuffled.

    Raises:
        ValueError: if the split is unknown, the dataset empty or a column missing, or if
            `num_people` is given with a dataset.
        MissingExtraError: if the `tools` extra is not installed.

    Example:
        >>> data = SearchEnv(show_example=False).reset()[0]
        >>> data["history"].prompt.role, data["tools"][0]["function"]["name"]
        (['system', 'user'], 'search')
    """

    def __init__(
        self,
        dataset: Dataset | None = None,
        *,
        split: Split = "train",
        num_people: int | None = None,
        num_results: int = 2,
        show_example: bool = True,
        tool_parser: str = "none",
        **options: Unpack[TaskOptions],
    ) -> None:
        own = {} if num_people is None else {"num_people": num_people}
        if dataset is None:
            documents, questions = search_corpus(seed=options.get("seed", 0), **own)
            questions = part_of(questions, split)
            rows = task_rows(questions, split=split, query="query")
        else:
            refuse_generator_options(own)
            rows = task_rows(dataset, split=split, query="query", columns=("answer", "documents"))
            documents = list(dict.fromkeys(document for row in rows for document in row.pop("documents")))
        opening = example_conversation() if show_example else ()
        for place, row in enumerate(rows):
            if not isinstance(row["query"], str):
                raise TypeError(f"the query of row {place} of dataset must be a text, got {row['query']!r:.80}.")
            row["query"] = [*opening, {"role": "user", "content": row["query"]}]
        named = RewardFn(is_answer_named, name="answer")
        searched = RewardFn(has_searched, name="searched", weight=0.2)
        index = SearchIndex(documents, num_results=num_results)
        super().__init__(
            rows,
            system_prompt=_SYSTEM_PROMPT,
            reward=Compose(
                ToolTransform([index.tool()], tool_parser=tool_parser), RubricReward(Rubric(named, searched))
            ),
            options={"name": split, "shuffle": split == "train", **options},
        )


class SearchOptions(TaskOptions, total=False):
    """Options of `make_search_env`; see `SearchEnv`."""

    num_people: int
    num_results: int
    show_example: bool
    tool_parser: str


@named_task("search", "questions that only a search tool can answer, over several turns")
def make_search_env(
    split: Split = "train", *, data: Dataset | None = None, **options: Unpack[SearchOptions]
) -> SearchEnv:
    """Make a `SearchEnv` over the generated corpus or over `data`.

    Example:
        >>> row = {"query": "Where does Ada live?", "answer": "Oslo", "documents": ["Ada lives in Oslo."]}
        >>> make_search_env("test", data=[row]).reset()[0]["answer"]
        'Oslo'
    """
    return SearchEnv(data, split=split, **options)
