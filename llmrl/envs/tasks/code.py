"""Code: small functions, judged by hidden tests in confined interpreters."""

from __future__ import annotations

import functools
import itertools
import json
import re
import secrets
from collections import Counter
from collections.abc import Sequence

from llmrl.envs.tasks.code_problems import code_problems
from llmrl.envs.tasks.task import DeclaredTaskEnv, Task, named_task
from llmrl.rewards import RewardFn, Rubric, extract_answer
from llmrl.sandbox.launch import PythonLimits
from llmrl.sandbox.service import PythonExecutorService
from llmrl.transforms import RubricReward

_SECONDS = 4.0
"""Limit of the processor time of all tests of an answer together."""
_WAIT_SECONDS = 20.0
"""Their time limit; longer, so that the answer is also judged correctly on a busy machine."""
_LIMITS = PythonLimits(
    memory_bytes=512 << 20, cpu_seconds=_SECONDS, num_processes=8, file_bytes=1 << 20, folder_bytes=1 << 20
)
# Blocks of all languages and of one line, so that no closing fence is taken for an opening one.
_FENCED = re.compile(r"```(?:([^\n`]*)\n)?(.*?)```", re.DOTALL)
_LANGUAGES = ("", "python", "py", "python3")
_MAX_CHARACTERS = 20_000

# The interpreter gets the inputs without the expected results, so the answer cannot read these. The
# random mark distinguishes results from lines that the answer prints.
_PROGRAM = """
import json
namespace = {{}}
exec(compile({code!r}, "answer.py", "exec"), namespace)
for numbers in {inputs!r}:
    try:
        result = json.dumps(namespace["solve"](numbers))
    except Exception:
        result = "failed"
    print("\\n" + {mark!r} + result, flush=True)
"""


@functools.cache
def _interpreters() -> PythonExecutorService:
    """Return the interpreters of this process, which all environments share."""
    return PythonExecutorService(pool_size=4, timeout=_WAIT_SECONDS, limits=_LIMITS, num_ready=2)


def code_of(completion: str, *, reasoning: bool = False) -> str | None:
    r"""Return the code of an answer: its last fenced block of Python, or the whole answer if it has none.

    Example:
        >>> code_of("So:\n```python\ndef solve(numbers):\n    return 1\n```")
        'def solve(numbers):\n    return 1\n'
    """
    answer = extract_answer(completion, reasoning=reasoning)
    if answer is None or len(answer) > _MAX_CHARACTERS:
        return None
    blocks = [found[2] for found in _FENCED.finditer(answer) if _is_python(found[1])]
    return [answer, *blocks][-1]


def _is_python(label: str | None) -> bool:
    """Return whether the text after an opening fence labels Python or nothing; None is a block of one line."""
    return label is not None and label.strip().partition(" ")[0].lower() in _LANGUAGES


async def run_tests(code: str, inputs: Sequence[object], expected: Sequence[str]) -> list[bool]:
    """Return whether `solve` passes each test; tests after the time limit or the end of the process fail.

    The untrusted `code` defines `solve`; `inputs` has the argument of each call, `expected` the JSON of each result,
    which the code cannot read. Raises ValueError if these are not JSON, or there are none or not
    one for each input, and IsolationError if this machine cannot confine code.
    """
    if not expected or len(inputs) != len(expected):
        raise ValueError(
            f"a row has {len(inputs)} inputs in 'hidden' and {len(expected)} results in 'expected'; give each "
            "input one result, and at least one."
        )
    right = [_canonical(result) for result in expected]
    if None in right:
        raise ValueError(f"'expected' must have the JSON of each result, got {expected[right.index(None)]!r:.80}.")
    mark = secrets.token_hex(8)
    program = _PROGRAM.format(code=code, inputs=list(inputs), mark=mark)
    result = await _interpreters().run(program)
    lines = [line.removeprefix(mark) for line in result.stdout.split("\n") if line.startswith(mark)]
    given = map(_canonical, lines[: len(right)])
    return [one == other for one, other in itertools.zip_longest(given, right)]


def _canonical(text: str) -> str | None:
    """Return JSON in one spelling, without regard to spaces and the order of names; None if the text is not JSON."""
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return None


def partial_credit(passed: Sequence[bool], expected: Sequence[str]) -> float:
    """Return the share of tests passed beyond what the best constant passes; 1 only if all are passed.

    Example:
        >>> partial_credit([True, True, False, False], ["0", "0", "1", "2"])
        0.0
    """
    num_constant = max(Counter(map(_canonical, expected)).values())
    if len(expected) == num_constant:
        return float(all(passed))
    return max(0.0, (sum(passed) - num_constant) / (len(expected) - num_constant))


class CodeReward(RubricReward):
    """Rewards the share of hidden tests that the answer's function passes, beyond those that a constant passes.

    A truncated answer gets 0, and an answer that passes all tests gets 1.

    Args:
        reasoning: whether the code is inside `<answer>` tags.

    Raises IsolationError if this machine cannot confine code.

    Example:
        >>> CodeReward(reasoning=False).rubric.names
        ['tests']
    """

    def __init__(self, *, reasoning: bool = False) -> None:
        async def tests(completion: str, hidden: Sequence[object], expected: Sequence[str]) -> float:
            code = code_of(completion, reasoning=reasoning)
            if code is None:
                return 0.0
            return partial_credit(await run_tests(code, hidden, expected), expected)

        _interpreters()  # raises IsolationError here instead of for every answer
        super().__init__(Rubric(RewardFn(tests), truncation_reward=0.0))


class CodeEnv(DeclaredTaskEnv):
    """Functions to write, judged by hidden tests; see `DeclaredTaskEnv` and `code_problems` for the arguments.

    Answers run in confined interpreters (`PythonExecutorService`), with limits of 4 s of processor time for all tests
    and 512 MiB. The interpreters get the inputs of the tests; results are compared outside. A custom dataset has the
    columns `query`, `hidden` (the argument of each call of `solve`) and `expected` (the JSON of each result).

    Raises IsolationError if this machine cannot confine code.

    Example:
        >>> CodeEnv().reset()[0]["history"].prompt.content[-1].splitlines()[0].partition(":")[0]
        'Write a Python function solve(numbers) for a list of integers'
    """

    task = Task(
        source=code_problems,
        columns=("hidden", "expected"),
        system_prompt="Reply with the function in one fenced block of Python, and nothing else.",
        reward=CodeReward,
        reasoning=False,
    )


make_code_env = named_task("code", "small functions of lists, judged by hidden tests in confined interpreters")(
    CodeEnv.make
)
