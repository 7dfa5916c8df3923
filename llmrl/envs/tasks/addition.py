"""Addition: a minimal task on which small models improve quickly."""

from __future__ import annotations

import random

from llmrl.envs.tasks.task import DeclaredTaskEnv, Split, Task, named_task, part_of
from llmrl.rewards import RewardFn, Rubric, extract_answer, last_number
from llmrl.transforms import RubricReward


def addition_problems(split: Split = "train", *, num_digits: int = 1) -> list[dict[str, str]]:
    """Return all sums of two numbers of `num_digits` (1 to 3) digits, in a fixed random order; a quarter is `test`.

    Example:
        >>> len(addition_problems("train")), len(addition_problems("test"))
        (75, 25)
        >>> addition_problems("test")[0].keys()
        dict_keys(['query', 'answer'])
    """
    if not 1 <= num_digits <= 3:
        raise ValueError(f"num_digits must be 1, 2 or 3, got {num_digits}.")
    numbers = [number for number in range(10**num_digits) if len(str(number)) == num_digits]
    problems = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a in numbers for b in numbers]
    random.Random(0).shuffle(problems)
    return part_of(problems, split)


def is_last_number_right(completion: str, answer: str) -> float:
    """Return 1 if the last number in the completion is the answer, else 0.

    Example:
        >>> is_last_number_right("7 + 8 = 15", "15"), is_last_number_right("no idea", "15")
        (1.0, 0.0)
    """
    number = last_number(completion)
    return float(number is not None and number == last_number(answer))


def last_number_reward(reasoning: bool) -> RubricReward:
    """Return a transform that rewards a correct last number with 1, and truncated rollouts with 0."""

    def right(completion: str, answer: str) -> float:
        return is_last_number_right(extract_answer(completion, reasoning=reasoning) or "", answer)

    return RubricReward(Rubric(RewardFn(right), truncation_reward=0.0))


class AdditionEnv(DeclaredTaskEnv):
    """Sums of two numbers; see `DeclaredTaskEnv` for the arguments and `addition_problems` for `num_digits`.

    A custom dataset has the columns `query` and `answer`. The problems are shuffled by default.

    Example:
        >>> AdditionEnv(split="test", repeats=4).reset()[0]["history"].prompt.role
        ['system', 'user']
    """

    task = Task(
        source=addition_problems,
        system_prompt="You are a calculator. Reply with the number only.",
        reward=last_number_reward,
        reasoning=False,
        shuffle=True,
    )


make_addition_env = named_task("addition", "sums of two numbers of one digit")(AdditionEnv.make)
