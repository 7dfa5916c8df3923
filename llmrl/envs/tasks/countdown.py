"""Countdown: reach a target with given numbers; problems are generated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Unpack

from llmrl._utils.types import Row
from llmrl.envs.tasks.answer_reward import AnswerReward
from llmrl.envs.tasks.task import Dataset, Split, TaskEnv, TaskOptions, is_in_split, task_rows
from llmrl.rewards import extract_answer, is_countdown_right

_SYSTEM_PROMPT = "The answer is one arithmetic expression, for example (25 + 3) * 4: end with it."


def countdown_problems(
    num_problems: int = 1000,
    *,
    split: Split = "train",
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
    seed: int = 0,
) -> Sequence[Row]:
    """Return numbers, a target within reach, and an expression that reaches it; train and test share no problem.

    Raises:
        ValueError: for bounds that leave no problem.

    Example:
        >>> countdown_problems(1, num_count=2, max_number=9)[0].keys()
        dict_keys(['query', 'numbers', 'target', 'solution'])
    """
    if num_count < 1 or max_number < 1 or max_target < num_count * max_number:
        raise ValueError(
            f"max_target must be at least num_count * max_number, both positive; got {max_target}, {num_count} and "
            f"{max_number}."
        )
    generator = random.Random(seed)
    problems = (_problem(generator, num_count, max_number, max_target) for _ in range(1000 * num_problems))
    chosen = (problem for problem in problems if is_in_split(problem["query"], split))
    rows = list(itertools.islice(chosen, num_problems))
    if len(rows) < num_problems:
        raise ValueError(f"the bounds leave no problems to the split {split!r}; raise max_number or num_count.")
    return rows


def _problem(generator: random.Random, num_count: int, max_number: int, max_target: int) -> Row:
    numbers = [generator.randint(1, max_number) for _ in range(num_count)]
    target = sum(numbers)
    solution = " + ".join(map(str, numbers))
    for _ in range(8):
        value, expression = _combine(generator, numbers)
        if 0 < value <= max_target:
            target = value
            solution = expression
            break
    query = (
        f"Use the numbers {', '.join(map(str, numbers))}, each at most once, with + - * / and parentheses, "
        f"to make {target}."
    )
    return {"query": query, "numbers": numbers, "target": target, "solution": solution}


def _combine(generator: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    value, *rest = generator.sample(numbers, len(numbers))
    expression = str(value)
    for number in rest:
        sign = generator.choice("+-*")
        if sign == "-" and number > value:
            value = number - value
            expression = f"({number} - {expression})"
        else:
            value = {"+": value + number, "-": value - number, "*": value * number}[sign]
            expression = f"({expression} {sign} {number})"
    return value, expression


class CountdownRewardParser(AnswerReward):
    """Rewards an expression that hits the target; see `AnswerReward` for what else is rewarded.

    Args:
        format_reward, correct_reward, set_done_if_answer: see `AnswerReward`.
        reasoning: whether the answer stands inside `<answer>` tags; else nothing marks an answer, and a wrong one
            gets nothing.

    Example:
        >>> CountdownRewardParser().rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        set_done_if_answer: bool = True,
        reasoning: bool = True,
    ) -> None:
        def is_right(completion: str, target: int, numbers: list[int]) -> bool:
            return is_countdown_right(completion, target, numbers, reasoning=reasoning)

        def has_answer(completion: str) -> bool:
            return reasoning and extract_answer(completion, reasoning=True) is not None

        super().__init__(
            is_right,
            has_answer,
            format_reward=format_reward,
            correct_reward=correct_reward,
            set_done_if_answer=set_done_if_answer,
        )


class CountdownOptions(TaskOptions, total=False):
    """What `make_countdown_env` hands on; see `countdown_problems`."""

    num_problems: int
    num_count: int
    max_number: int
    max_target: int


class CountdownEnv(TaskEnv):
    """The numbers game, on generated problems.

    Args:
        dataset: problems of one's own, with columns `query`, `numbers` and `target`; by default they are generated.
        split, num_problems, num_count, max_number, max_target: see `countdown_problems`; `seed` draws them too.
        reasoning, **options: see `GSM8KEnv`.

    Raises:
        ValueError: for bounds that leave no problem.

    Example:
        >>> env = CountdownEnv(num_count=2, max_number=9)
        >>> len(env.reset()[0]["numbers"])
        2
    """

    def __init__(
        self,
        dataset: Dataset | None = None,
        *,
        split: Split = "train",
        num_problems: int = 1000,
        num_count: int = 4,
        max_number: int = 100,
        max_target: int = 1000,
        reasoning: bool = True,
        **options: Unpack[TaskOptions],
    ) -> None:
        rows = countdown_problems(
            num_problems,
            split=split,
            num_count=num_count,
            max_number=max_number,
            max_target=max_target,
            seed=options.get("seed", 0),
        )
        if dataset is not None:
            rows = task_rows(dataset, split=split, query="query", columns=("numbers", "target"))
        super().__init__(
            rows,
            system_prompt=_SYSTEM_PROMPT,
            reward=CountdownRewardParser(reasoning=reasoning),
            reasoning=reasoning,
            options={"name": split, **options},
        )


def make_countdown_env(
    split: Split = "train",
    *,
    data: Dataset | None = None,
    reasoning: bool = True,
    **options: Unpack[CountdownOptions],
) -> CountdownEnv:
    """Make a `CountdownEnv` over generated problems, or over some of one's own.

    Example:
        >>> make_countdown_env("test").reset()[0]["rollout", "group_id"]
        'test/0/0'
    """
    return CountdownEnv(data, split=split, reasoning=reasoning, **options)
