"""Task environments by name, for configurations and the command line."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from torchrl.envs import EnvBase

from llmrl._utils.arguments import keywords_of, nearest, refuse_unknown
from llmrl.envs.hubs.verifiers import VerifiersEnv
from llmrl.envs.tasks.task import TASKS, Dataset

_VERIFIERS = "verifiers:"


def task_environments() -> dict[str, str]:
    """Return a one-line description of each task environment, by name.

    Example:
        >>> task_environments()["gsm8k"]
        'word problems of grade-school mathematics'
    """
    return {name: line for name, (_, line) in TASKS.items()}


def make_task_env(
    name: str, /, split: str = "train", *, data: Dataset | None = None, repeats: int = 1, **options: object
) -> EnvBase:
    """Make a task environment by its name, or with your own function.

    Args:
        name: a name in `task_environments()`, `verifiers:TASKSET` for a `VerifiersEnv`, or `FILE.py:FUNCTION` for a
            function that returns an environment. It is called with the options, and with `split`, `repeats`, `data`
            and `seed` if it has such parameters.
        split: `train`, `test`, or a split of the hub's dataset, such as `train[:-100]`.
        data: your own problems: a hub name, a file or folder, or rows.
        repeats: group size, the number of conversations per problem.
        **options: keyword arguments of the environment's `make_…_env`.

    Raises:
        ValueError: if the name is unknown, or if `data` is given to an environment that generates its problems.
        FileNotFoundError: if the file does not exist.
        TypeError: if an option is unknown.

    Example:
        >>> make_task_env("countdown", "test", repeats=4, num_count=3).reset()[0]["rollout", "group_id"]
        'test/0/0'
        >>> make_task_env("countdown", num_counts=3)
        Traceback (most recent call last):
        TypeError: CountdownEnv has no argument 'num_counts'; did you mean 'num_count'?
    """
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        return _make_own(Path(file), function, {"split": split, "repeats": repeats, "data": data}, options)
    if name.startswith(_VERIFIERS):
        if data is not None:
            raise ValueError(f"data is given, and {name!r} has tasks of its own: choose among them with select=.")
        refuse_unknown(name, options, keywords_of(VerifiersEnv.__init__) or ())
        make_verifiers: Callable[..., EnvBase] = VerifiersEnv
        return make_verifiers(name.removeprefix(_VERIFIERS), **{"name": split, **options}, split=split, repeats=repeats)
    if name not in TASKS:
        near = nearest(name, TASKS)
        hint = f"Did you mean {near!r}?" if near else "One of your own is FILE.py:FUNCTION."
        raise ValueError(f"there is no task environment {name!r}, only {', '.join(TASKS)}. {hint}")
    make = TASKS[name][0]
    if data is not None:
        if "data" not in inspect.signature(make).parameters:
            raise ValueError(f"data is given, and the environment {name!r} makes its own problems.")
        options["data"] = data
    return make(split, repeats=repeats, **options)


def load_function(path: Path, name: str) -> Callable[..., object]:
    """Run a Python file and return its function `name`.

    Raises FileNotFoundError if there is no such file, and ValueError if it has no such function.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} to take the function {name!r} from.")
    module_name = f"llmrl_own_{path.resolve().stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # it is a Python file
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # so that pickle finds its classes
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module_name]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}.")
    return make


def _make_own(path: Path, name: str, given: dict[str, object], options: dict[str, object]) -> EnvBase:
    """Call a function in a user's file."""
    make = load_function(path, name)
    known = keywords_of(make)
    if known is not None:
        if given["data"] is not None and "data" not in known:
            raise ValueError(f"data is given, and {name} of {path} has no parameter data.")
        optional = {**given, "seed": options.pop("seed", 0)}
        options |= {key: value for key, value in optional.items() if key in known and value is not None}
        refuse_unknown(f"{name} of {path}", options, known)
    env = make(**options)
    if not isinstance(env, EnvBase):
        raise TypeError(f"{name} of {path} must give an environment (an EnvBase), got {type(env).__name__}.")
    return env
