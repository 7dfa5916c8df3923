"""Countdown: generated problems that ask for an expression of given numbers with a target value."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from llmrl._utils.types import Row
from llmrl.envs.tasks.answer_reward import AnswerReward
from llmrl.envs.tasks.task import DeclaredTaskEnv, Split, Task, is_in_split, named_task
from llmrl.rewards import is_countdown_right


def countdown_problems(
    num_problems: int = 1000,
    *,
    split: Split = "train",
    num_count: int = 4,
    max_number: int = 100,
    max_target: int = 1000,
    seed: int = 0,
) -> Sequence[Row]:
    """Return problems with numbers, a reachable target and a solution; the splits share no problem.

    ValueError is raised if the bounds are invalid or leave too few problems.

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
        raise ValueError(f"the bounds leave too few problems in the split {split!r}; raise max_number or num_count.")
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
    """Rewards an expression with the target value; see `AnswerReward`.

    Without `reasoning`, a wrong answer gets no format reward, because answers have no tags.

    Example:
        >>> CountdownRewardParser().rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    def is_right(self, completion: str, target: int, numbers: list[int]) -> bool:
        """Return whether the answer is an expression with the target value."""
        return is_countdown_right(completion, target, numbers, reasoning=self.reasoning)

    def has_answer(self, completion: str) -> bool:
        """Return whether there is an answer in tags."""
        return self.reasoning and super().has_answer(completion)


class CountdownEnv(DeclaredTaskEnv):
    """Generated Countdown problems; see `DeclaredTaskEnv` and `countdown_problems` for the arguments.

    A custom dataset has the columns `query`, `numbers` and `target`.

    Example:
        >>> env = CountdownEnv(num_count=2, max_number=9)
        >>> len(env.reset()[0]["numbers"])
        2
    """

    task = Task(
        source=countdown_problems,
        columns=("numbers", "target"),
        system_prompt="The answer is one arithmetic expression, for example (25 + 3) * 4: end with it.",
        reward=CountdownRewardParser,
    )


make_countdown_env = named_task("countdown", "expressions that reach a target with given numbers")(CountdownEnv.make)
