"""Addition: the smallest task on which a model visibly learns."""

from __future__ import annotations

import random
import re
from typing import Literal

from torchrl.envs import TransformedEnv

from llmrl.envs.dataset import DatasetChatEnv
from llmrl.rewards import RewardFn, Rubric
from llmrl.transforms import RubricReward

_NUMBER = re.compile(r"-?\d+")
_SYSTEM_PROMPT = "You are a calculator. Reply with the number only."


def addition_problems(
    split: Literal["train", "test"] = "train", *, num_digits: int = 1, test_fraction: float = 0.25, seed: int = 0
) -> list[dict[str, str]]:
    """All sums of two `num_digits`-digit numbers, shuffled once and split; train and test share no problem.

    Raises:
        ValueError: for an unknown split, or more than three digits (a million problems).

    Example:
        >>> len(addition_problems("train")), len(addition_problems("test"))
        (75, 25)
        >>> addition_problems("test")[0].keys()
        dict_keys(['query', 'answer'])
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}.")
    if not 1 <= num_digits <= 3:
        raise ValueError(f"num_digits must be 1, 2 or 3, got {num_digits}.")
    numbers = range(0 if num_digits == 1 else 10 ** (num_digits - 1), 10**num_digits)
    problems = [{"query": f"{a} + {b} =", "answer": str(a + b)} for a in numbers for b in numbers]
    random.Random(seed).shuffle(problems)
    num_test = round(len(problems) * test_fraction)
    return problems[:num_test] if split == "test" else problems[num_test:]


def is_last_number_right(completion: str, answer: str) -> float:
    """1 when the last number in the completion is the answer.

    Example:
        >>> is_last_number_right("7 + 8 = 15", "15"), is_last_number_right("no idea", "15")
        (1.0, 0.0)
    """
    numbers = _NUMBER.findall(completion)
    return float(bool(numbers) and numbers[-1] == answer)


class AdditionEnv(DatasetChatEnv):
    """Opens conversations with sums; append `RubricReward` to score them, or use `make_addition_env`.

    Example:
        >>> AdditionEnv("test", repeats=4).reset()["history"].prompt.role
        ['system', 'user']
    """

    def __init__(
        self,
        split: Literal["train", "test"] = "train",
        *,
        num_digits: int = 1,
        repeats: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int | None = None,
    ) -> None:
        super().__init__(
            addition_problems(split, num_digits=num_digits),
            system_prompt=_SYSTEM_PROMPT,
            repeats=repeats,
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            name=split,
        )


def make_addition_env(
    split: Literal["train", "test"] = "train",
    *,
    num_digits: int = 1,
    repeats: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    num_epochs: int | None = None,
) -> TransformedEnv:
    """An `AdditionEnv` that rewards a completed answer whose last number is the sum; a truncated one gets 0.

    Example:
        >>> type(make_addition_env()).__name__
        'TransformedEnv'
    """
    env = AdditionEnv(split, num_digits=num_digits, repeats=repeats, shuffle=shuffle, seed=seed, num_epochs=num_epochs)
    rubric = Rubric(RewardFn(is_last_number_right, name="right"), truncation_reward=0.0)
    return env.append_transform(RubricReward(rubric))
