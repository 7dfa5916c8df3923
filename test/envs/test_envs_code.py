"""The task `code`: generated functions, hidden tests in confined interpreters, and answers that try to cheat."""

from __future__ import annotations

import ast
import json

import pytest

from llmrl._utils.asynchronous import run_sync
from llmrl.audit import audit
from llmrl.envs import code_problems, make_task_env
from llmrl.envs.tasks.code import code_of, partial_credit, run_tests
from llmrl.rewards.reward import RewardInput

pytestmark = pytest.mark.usefixtures("own_programs")  # interpreters
ROWS = [
    {"hidden": [[], [1], [2, 3], [4]], "expected": ["0", "1", "5", "4"]},  # the sum
]


def passed(code, row=ROWS[0]):
    return run_sync(run_tests(code, row["hidden"], row["expected"]))


def reward(completion, row=ROWS[0]):
    env = make_task_env("code", "test")
    messages = ({"role": "assistant", "content": completion},)
    return run_sync(env.transform.rubric.score(RewardInput(messages, columns=row))).reward


def test_a_right_function_passes_and_a_wrong_one_gets_what_it_passes_beyond_a_constant():
    assert passed("def solve(numbers):\n    return sum(numbers)") == [True] * 4
    first = "```python\ndef solve(numbers):\n    return numbers[0] if numbers else 0\n```"
    assert reward(first) == pytest.approx(2 / 3)  # three of four, of which a constant passes one
    assert reward("```python\ndef solve(numbers):\n    return 5\n```") == 0
    assert reward("def solve(numbers):\n    return sum(numbers)") == 1  # without a fence
    assert partial_credit([True, True], ["true", "true"]) == 1
    assert partial_credit([True, False], ["true", "true"]) == 0


def test_types_are_told_apart_and_the_input_may_be_changed():
    row = {"hidden": [[1], [2, 1]], "expected": ["1", "[1, 2]"]}
    assert passed("def solve(numbers):\n    return True", row) == [False, False]
    assert passed("def solve(numbers):\n    return 1.0", row) == [False, False]
    assert passed("def solve(n):\n    n.sort()\n    return n if len(n) > 1 else 1", row) == [True, True]


CODE = "def solve(numbers):\n    return sum(numbers)\n"


@pytest.mark.parametrize(
    "completion",
    [
        f'An example:\n```json\n{{"solve": 1}}\n```\nAnd the function:\n```python\n{CODE}```',
        f"Call ```solve(numbers)```\nas here:\n```python\n{CODE}```",
        f"```Python3 title=answer.py\n{CODE}```",
        f"```python\n{CODE}```\nIt prints\n```text\n5\n```\nfor 2 and 3.",
        f"So: ```py\n{CODE}```",
    ],
)
def test_the_code_is_the_last_block_of_python_among_others(completion):
    assert code_of(completion) == CODE


def test_results_are_compared_as_json_values():
    row = {"hidden": [[1], [2], [3], [4]], "expected": ['[1,{"b":2,"a":1}]', "1e1", "[ ]", '"\\u00e4"']}
    code = """
def solve(numbers):
    return {1: [1, {"a": 1, "b": 2}], 2: 10.0, 3: [], 4: "ä"}[numbers[0]]
"""
    assert passed(code, row) == [True] * 4
    constant = {"hidden": [[1], [2], [3]], "expected": ["[1,2]", "[1, 2]", "0"]}
    assert reward("```python\ndef solve(numbers):\n    return [1, 2]\n```", constant) == 0


@pytest.mark.parametrize(
    ("hidden", "expected", "words"),
    [
        ([], [], "0 inputs in 'hidden' and 0 results"),
        ([[1], [2]], ["1"], "2 inputs in 'hidden' and 1 results"),
        ([[1], [2]], ["1", ""], "JSON of each result, got ''"),
        ([[1]], ["violet"], "JSON of each result, got 'violet'"),
        ([[1]], [1], "JSON of each result, got 1"),
    ],
)
def test_a_row_without_results_to_compare_is_an_error_and_no_score(hidden, expected, words):
    env = make_task_env("code", "test")
    messages = ({"role": "assistant", "content": CODE},)
    columns = {"hidden": hidden, "expected": expected}
    score = run_sync(env.transform.rubric.score(RewardInput(messages, columns=columns)))
    assert not score.is_scored and words in score.error


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def broken(", [False] * 4),
        ("x = 1", [False] * 4),
        ("def solve(numbers):\n    raise KeyboardInterrupt", [False] * 4),
        ("def solve(numbers):\n    return {1}", [False] * 4),
        ("def solve(numbers):\n    if len(numbers) == 2:\n        raise ValueError\n    return sum(numbers)",
         [True, True, False, True]),
        ("import os\ndef solve(numbers):\n    if len(numbers) == 2:\n        os._exit(0)\n    return sum(numbers)",
         [True, True, False, False]),
        ("def solve(numbers):\n    if len(numbers) == 2:\n        x = bytearray(10**10)\n    return sum(numbers)",
         [True, True, False, True]),
        ("def solve(numbers):\n    print('0\\n1\\n5\\n4')\n    return 7", [False] * 4),
    ],
)  # fmt: skip
def test_a_function_that_fails_loses_only_the_tests_from_there(code, expected):
    assert passed(code) == expected


def test_a_function_that_never_ends_keeps_what_it_passed_before(takes_long):
    code = "def solve(numbers):\n    while len(numbers) == 2:\n        pass\n    return sum(numbers)"
    assert passed(code) == [True, True, False, False]


def test_what_is_expected_is_nowhere_in_the_interpreter():
    row = {"hidden": [[3], [4]], "expected": ['"violet"', '"crimson"']}
    search = """
import gc, os, sys
def solve(numbers):
    frame, found = sys._getframe(), []
    while frame is not None:
        found += [repr(frame.f_locals), repr(frame.f_globals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    found += [repr(one) for one in gc.get_objects() if type(one) in (list, dict, tuple)]
    found += [open("/proc/self/cmdline").read(), repr(os.environ), repr(os.listdir("."))]
    text = "".join(found)
    return [word in text for word in ("[[3], [4]]", *map("".join, (["vio", "let"], ["crim", "son"])))]
"""
    assert passed(search, {**row, "expected": ["[true, false, false]"] * 2}) == [True, True]  # inputs alone


def test_problems_show_no_hidden_test_and_their_solutions_pass_them():
    train, test = code_problems(500), code_problems(500, split="test")
    for rows in (train, test):
        for row in rows:
            shown = [
                ast.literal_eval(line.partition("(")[2].partition(") ==")[0]) for line in row["query"].split("\n")[1:]
            ]
            assert len(shown) == 2 and not [one for one in shown if one in row["hidden"]]
            assert len(row["hidden"]) == len(row["expected"]) == 10 and len({*map(str, row["hidden"])}) == 10
            most = max(row["expected"].count(one) for one in row["expected"])
            assert most <= 5  # a constant passes at most half
    described = [{row["query"].split("\n")[0] for row in rows} for rows in (train, test)]
    assert len(described[0]) == len(train) > 200 and len(described[1]) == len(test) > 20
    assert not described[0] & described[1]
    for num_parts in (1, 3):
        [row, *_] = code_problems(1, num_parts=num_parts)
        assert passed(code_of(row["solution"]), row) == [True] * 10
    with pytest.raises(ValueError, match="num_parts"):
        code_problems(1, num_parts=4)


def test_expected_values_are_those_of_a_function_written_by_hand():
    rows = {
        row["query"].split(": ")[1].split("\n")[0]: row
        for row in (*code_problems(500), *code_problems(500, split="test"))
    }
    by_hand = {
        "keep those that are odd, then return their sum.": lambda n: sum(filter(lambda x: x & 1, n)),
        "square each, then return their list in reverse.": lambda n: [x**2 for x in reversed(n)],
        "keep those that are greater than 3, then return how many there are.": lambda n: len([x for x in n if x >= 4]),
        "negate each, then return the largest, or 0 if there is none.": lambda n: -min(n) if n else 0,
    }
    for words, function in by_hand.items():
        row = rows[words]
        assert row["expected"] == [json.dumps(function(numbers)) for numbers in row["hidden"]]


def test_the_audit_finds_nothing(renderer, takes_long):
    def make(split):
        return make_task_env("code", split, repeats=2)

    found = audit(make, renderer, num_problems=4, splits=("train", "test"))
    assert found.verdict == "fine", found
