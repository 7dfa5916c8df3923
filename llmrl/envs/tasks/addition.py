"""Addition: the smallest task on which a model visibly learns."""

from __future__ import annotations

import random
from typing import Unpack

from llmrl.envs.tasks.task import Dataset, Split, TaskEnv, TaskOptions, check_split, task_rows
from llmrl.rewards import RewardFn, Rubric, extract_answer, last_number
from llmrl.transforms import RubricReward


def addition_problems(
    split: Split = "train", *, num_digits: int = 1, test_fraction: float = 0.25, seed: int = 0
) -> list[dict[str, str]]:
    """Return all sums of two `num_digits`-digit numbers, shuffled once and split; train and test share no problem.

    Raises:
        ValueError: for an unknown split, or more than three digits (a million problems).

    Example:
        >>> len(addition_problems("train")), len(addition_problems("test"))
        (75, 25)
        >>> addition_problems("test")[0].keys()
        dict_keys(['query', 'answer'])
    """
    check_split(split)
    if not 1 <= num_digits <= 3:
        raise ValueError(f"num_digits must be 1, 2 or 3, got {num_digits}.")
    numbers = range(0 if num_digits == 1 else 10 ** (num_digits - 1), 10**num_digits)
    problems = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    num_test = round(len(problems) * test_fraction)
    return problems[:num_test] if split == "test" else problems[num_test:]


def is_last_number_right(completion: str, answer: str) -> float:
    """Return 1 when the last number in the completion is the answer.

    Example:
        >>> is_last_number_right("7 + 8 = 15", "15"), is_last_number_right("no idea", "15")
        (1.0, 0.0)
    """
    number = last_number(completion)
    return float(number is not None and number == last_number(answer))


class AdditionEnv(TaskEnv):
    """Asks for sums; a completed answer with the sum as its last number gets 1, a truncated one 0.

    Args:
        dataset: problems of one's own, with columns `query` and `answer`; by default they are `addition_problems`.
        split, num_digits: see `addition_problems`.
        reasoning, **options: see `GSM8KEnv`; `shuffle` is on unless it is given.

    Raises:
        ValueError: for an unknown split or number of digits.

    Example:
        >>> AdditionEnv(split="test", repeats=4).reset()[0]["history"].prompt.role
        ['system', 'user']
    """

    def __init__(
        self,
        dataset: Dataset | None = None,
        *,
        split: Split = "train",
        num_digits: int = 1,
        reasoning: bool = False,
        **options: Unpack[TaskOptions],
    ) -> None:
        def right(completion: str, answer: str) -> float:
            return is_last_number_right(extract_answer(completion, reasoning=reasoning) or "", answer)

        if dataset is None:
            dataset = addition_problems(split, num_digits=num_digits)
        super().__init__(
            task_rows(dataset, split=split, query="query", columns=("answer",)),
            system_prompt="You are a calculator. Reply with the number only.",
            reward=RubricReward(Rubric(RewardFn(right), truncation_reward=0.0)),
            reasoning=reasoning,
            options={"name": split, "shuffle": True, **options},
        )


def make_addition_env(
    split: Split = "train",
    *,
    data: Dataset | None = None,
    num_digits: int = 1,
    reasoning: bool = False,
    **options: Unpack[TaskOptions],
) -> AdditionEnv:
    """Make an `AdditionEnv` over generated problems, or over some of one's own.

    Example:
        >>> make_addition_env("test").reset()[0]["rollout", "group_id"].split("/")[0]
        'test'
    """
    return AdditionEnv(data, split=split, num_digits=num_digits, reasoning=reasoning, **options)
