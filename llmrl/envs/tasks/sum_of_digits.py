"""Sum of digits: the worked example of a task environment with generated problems."""

from __future__ import annotations

import itertools
import random
from typing import Unpack

from llmrl.envs.tasks.addition import is_last_number_right
from llmrl.envs.tasks.task import Dataset, Split, TaskEnv, TaskOptions, is_in_split, task_rows
from llmrl.rewards import RewardFn, Rubric, extract_answer
from llmrl.transforms import RubricReward


def sum_of_digits_problems(
    num_problems: int = 1000, *, split: Split = "train", num_digits: int = 3, seed: int = 0
) -> list[dict[str, str]]:
    """Return numbers of `num_digits` digits, and the sums of their digits; train and test share no number.

    Example:
        >>> sum_of_digits_problems(1)[0].keys()
        dict_keys(['query', 'answer'])
    """
    generator = random.Random(seed)
    drawn = ("".join(generator.choices("0123456789", k=num_digits)) for _ in itertools.count())
    numbers = itertools.islice((number for number in drawn if is_in_split(number, split)), num_problems)
    return [{"query": f"The sum of the digits of {n} =", "answer": str(sum(map(int, n)))} for n in numbers]


class SumOfDigitsOptions(TaskOptions, total=False):
    """What `make_sum_of_digits_env` hands on; see `sum_of_digits_problems`."""

    num_problems: int
    num_digits: int


class SumOfDigitsEnv(TaskEnv):
    """Asks for the sum of a number's digits.

    Args:
        dataset: problems of one's own, with columns `query` and `answer`; by default they are generated.
        split, num_problems, num_digits: see `sum_of_digits_problems`; `seed` draws them too.
        reasoning, **options: see `GSM8KEnv`.

    Example:
        >>> SumOfDigitsEnv().reset()[0]["history"].prompt.role
        ['system', 'user']
    """

    def __init__(
        self,
        dataset: Dataset | None = None,
        *,
        split: Split = "train",
        num_problems: int = 1000,
        num_digits: int = 3,
        reasoning: bool = False,
        **options: Unpack[TaskOptions],
    ) -> None:
        def right(completion: str, answer: str) -> float:
            return is_last_number_right(extract_answer(completion, reasoning=reasoning) or "", answer)

        if dataset is None:
            dataset = sum_of_digits_problems(
                num_problems, split=split, num_digits=num_digits, seed=options.get("seed", 0)
            )
        super().__init__(
            task_rows(dataset, split=split, query="query", columns=("answer",)),
            system_prompt="You are a calculator. The answer is a number: end with it.",
            reward=RubricReward(Rubric(RewardFn(right), truncation_reward=0.0)),
            reasoning=reasoning,
            options={"name": split, **options},
        )


def make_sum_of_digits_env(
    split: Split = "train",
    *,
    data: Dataset | None = None,
    reasoning: bool = False,
    **options: Unpack[SumOfDigitsOptions],
) -> SumOfDigitsEnv:
    """Make a `SumOfDigitsEnv` over generated problems, or over some of one's own.

    Example:
        >>> make_sum_of_digits_env("test").reset()[0]["rollout", "group_id"]
        'test/0/0'
    """
    return SumOfDigitsEnv(data, split=split, reasoning=reasoning, **options)
