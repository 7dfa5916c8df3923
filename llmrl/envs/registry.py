"""Task environments by name, for configurations and the command line."""

from __future__ import annotations

from collections.abc import Callable

from llmrl._utils.arguments import keywords_of, nearest, refuse_unknown
from llmrl.envs.addition import make_addition_env
from llmrl.envs.countdown import make_countdown_env
from llmrl.envs.gsm8k import make_gsm8k_env
from llmrl.envs.ifeval import make_ifeval_env
from llmrl.envs.math import make_math_env
from llmrl.envs.reasoning_gym import make_reasoning_gym_env
from llmrl.envs.search import make_search_env
from llmrl.envs.sum_of_digits import make_sum_of_digits_env
from llmrl.envs.task import Dataset, TaskEnv

_MAKERS: dict[str, tuple[Callable[..., TaskEnv], str]] = {
    "addition": (make_addition_env, "sums of two numbers of one digit"),
    "sum-of-digits": (make_sum_of_digits_env, "sums of a number's digits"),
    "countdown": (make_countdown_env, "expressions that reach a target with given numbers"),
    "gsm8k": (make_gsm8k_env, "word problems of grade-school mathematics"),
    "math": (make_math_env, "competition mathematics"),
    "ifeval": (make_ifeval_env, "instructions that a program can check; on the hub it has only the split train"),
    "reasoning-gym": (make_reasoning_gym_env, "chained sums of reasoning-gym, which has many more tasks"),
    "search": (make_search_env, "questions that only a search tool can answer, over several turns"),
}


def task_environments() -> dict[str, str]:
    """Return the name of each task environment, and a line about it.

    Example:
        >>> task_environments()["gsm8k"]
        'word problems of grade-school mathematics'
    """
    return {name: line for name, (_, line) in _MAKERS.items()}


def make_task_env(
    name: str, /, split: str = "train", *, data: Dataset | None = None, repeats: int = 1, **options: object
) -> TaskEnv:
    """Make a task environment by its name.

    Args:
        name: one of `task_environments()`.
        split: which of its problems: `train`, `test`, or what the hub's data have, such as `train[:-100]`.
        data: problems of one's own: a hub name, a file or folder, or rows.
        repeats: conversations a problem: the group size.
        **options: the keywords of the environment's own `make_…_env`.

    Raises:
        ValueError: for an unknown name, or data for an environment that makes its own problems.
        TypeError: for an option that the environment does not have, with the nearest name.

    Example:
        >>> make_task_env("countdown", "test", repeats=4, num_count=3).reset()["rollout", "group_id"]
        'test/0/0'
        >>> make_task_env("countdown", num_counts=3)
        Traceback (most recent call last):
        TypeError: make_countdown_env has no argument 'num_counts'; did you mean 'num_count'?
    """
    if name not in _MAKERS:
        near = nearest(name, _MAKERS)
        hint = f" Did you mean {near!r}?" if near else ""
        raise ValueError(f"there is no task environment {name!r}, only {', '.join(_MAKERS)}.{hint}")
    make = _MAKERS[name][0]
    known = keywords_of(make) or ()
    if data is not None:
        if "data" not in known:
            raise ValueError(f"data is given, and the environment {name!r} makes its own problems.")
        options["data"] = data
    refuse_unknown(make.__name__, options, known)
    return make(split, repeats=repeats, **options)
