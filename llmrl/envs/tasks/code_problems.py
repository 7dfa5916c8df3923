"""Small functions to write: generated descriptions, examples, hidden tests and a correct solution."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeAlias

from llmrl._utils.types import Row
from llmrl.envs.tasks.task import Split, is_in_split

Solve: TypeAlias = Callable[[list[int]], object]

# Words of a description, and the Python expression for them.
_KEEP = {
    "all": "True",
    "those that are even": "x % 2 == 0",
    "those that are odd": "x % 2 == 1",
    "those that are greater than {k}": "x > {k}",
    "those that are less than {k}": "x < {k}",
    "those that are divisible by {k}": "x % {k} == 0",
    "those that are not divisible by {k}": "x % {k} != 0",
}
_CHANGE = {
    "": "x",
    "double each": "2 * x",
    "square each": "x * x",
    "add {k} to each": "x + {k}",
    "multiply each by {k}": "{k} * x",
    "negate each": "-x",
}
_GIVE = {
    "their list": "list(kept)",
    "their sum": "sum(kept)",
    "how many there are": "len(kept)",
    "the largest, or 0 if there is none": "max(kept, default=0)",
    "the smallest, or 0 if there is none": "min(kept, default=0)",
    "their list in ascending order": "sorted(kept)",
    "their list without repetitions, in the order of first appearance": "list(dict.fromkeys(kept))",
    "their list in reverse": "list(kept)[::-1]",
}
_NUMBERS = range(2, 6)
_NUM_HIDDEN = 10
_NUM_SHOWN = 2

_SOLUTION = """def solve(numbers):
    kept = [{change} for x in numbers if {keep}]
    return {give}"""


def code_problems(
    num_problems: int = 400, *, split: Split = "train", num_parts: int = 2, seed: int = 0
) -> Sequence[Row]:
    """Return problems that ask for a function of a list of integers, with two examples and ten hidden tests.

    A function keeps some numbers, changes them, and returns a list or a number; the splits share no function.

    Args:
        num_problems: number of problems; fewer are returned if the split has fewer functions of `num_parts`.
        num_parts: number of these three parts that are not trivial, 1 to 3; other numbers raise ValueError.

    Example:
        >>> row = code_problems(1)[0]
        >>> sorted(row), len(row["hidden"])
        (['expected', 'hidden', 'query', 'solution'], 10)
    """
    if num_parts not in (1, 2, 3):
        raise ValueError(f"num_parts must be 1, 2 or 3, got {num_parts}.")
    generator = random.Random(seed)
    described = (
        _described(keep, change, give, k)
        for keep, change, give, k in itertools.product(_KEEP, _CHANGE, _GIVE, _NUMBERS)
        if (keep != "all") + (change != "") + (give != "their list") == num_parts
    )
    functions = sorted({(text, solution) for text, solution in described if is_in_split(text, split)})
    generator.shuffle(functions)
    return [_problem(text, solution, generator) for text, solution in functions[:num_problems]]


def _described(keep: str, change: str, give: str, k: int) -> tuple[str, str]:
    """Return a function's description in words, and its code."""
    steps = ["" if keep == "all" else f"keep {keep}", change, f"return {give}"]
    text = ", then ".join(filter(None, steps)).format(k=k)
    parts = {"keep": _KEEP[keep], "change": _CHANGE[change], "give": _GIVE[give]}
    return text, _SOLUTION.format(**{name: part.format(k=k) for name, part in parts.items()})


def _problem(text: str, solution: str, generator: random.Random) -> dict[str, object]:
    namespace: dict[str, Solve] = {}
    exec(solution, namespace)  # code from the tables above
    solve = namespace["solve"]
    tried = [[], *([generator.randint(-9, 20) for _ in range(generator.randint(1, 7))] for _ in range(60))]
    unique = [list(numbers) for numbers in dict.fromkeys(map(tuple, tried))]
    hidden = _varied(unique, solve)
    shown = [numbers for numbers in unique if numbers not in hidden and numbers][:_NUM_SHOWN]
    examples = "\n".join(f"solve({numbers}) == {solve(numbers)}" for numbers in shown)
    return {
        "query": f"Write a Python function solve(numbers) for a list of integers: {text}.\n{examples}",
        "hidden": hidden,
        "expected": [json.dumps(solve(numbers)) for numbers in hidden],
        "solution": f"```python\n{solution}\n```",
    }


def _varied(inputs: Sequence[list[int]], solve: Solve) -> list[list[int]]:
    """Return ten inputs with as many different outputs as possible, so that no constant passes many tests."""
    counts: Counter[str] = Counter()
    order = []
    for numbers in inputs:
        given = json.dumps(solve(numbers))
        order.append((counts[given], numbers))
        counts[given] += 1
    return [numbers for _, numbers in sorted(order, key=lambda one: one[0])][:_NUM_HIDDEN]
