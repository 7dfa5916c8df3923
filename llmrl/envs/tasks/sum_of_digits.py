"""Sum of digits: the documentation's example of a task with generated problems."""

from __future__ import annotations

import itertools
import random

from llmrl._utils.arguments import check_least
from llmrl.envs.tasks.addition import last_number_reward
from llmrl.envs.tasks.task import DeclaredTaskEnv, Split, Task, is_in_split, named_task


def sum_of_digits_problems(
    num_problems: int = 1000, *, split: Split = "train", num_digits: int = 3, seed: int = 0
) -> list[dict[str, str]]:
    """Return questions about the digits of random numbers of `num_digits` digits; the splits share no number.

    Example:
        >>> sum_of_digits_problems(1)
        [{'query': 'The sum of the digits of 874 =', 'answer': '19'}]
    """
    check_least(1, num_digits=num_digits)
    generator = random.Random(seed)
    drawn = ("".join(generator.choices("0123456789", k=num_digits)) for _ in itertools.count())
    numbers = itertools.islice((number for number in drawn if is_in_split(number, split)), num_problems)
    return [{"query": f"The sum of the digits of {n} =", "answer": str(sum(map(int, n)))} for n in numbers]


class SumOfDigitsEnv(DeclaredTaskEnv):
    """Sums of digits; see `DeclaredTaskEnv` and `sum_of_digits_problems` for the arguments.

    A custom dataset has the columns `query` and `answer`.

    Example:
        >>> SumOfDigitsEnv().reset()[0]["history"].prompt.role
        ['system', 'user']
    """

    task = Task(
        source=sum_of_digits_problems,
        system_prompt="You are a calculator. The answer is a number: end with it.",
        reward=last_number_reward,
        reasoning=False,
    )


make_sum_of_digits_env = named_task("sum-of-digits", "sums of a number's digits")(SumOfDigitsEnv.make)
