"""Environments by name: tasks of llmrl, and environments of other libraries, installed packages and your files."""

from __future__ import annotations

import functools
import importlib.util
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from packaging.utils import canonicalize_name
from torchrl.envs import EnvBase

from llmrl._utils.arguments import keywords_of, nearest, parameters_of, refuse_unknown
from llmrl._utils.failure import describe
from llmrl._utils.imports import own_function
from llmrl.envs.hubs.gymnasium import GymnasiumEnv
from llmrl.envs.hubs.harbor import HarborEnv
from llmrl.envs.hubs.miniwob import MiniWoBEnv
from llmrl.envs.hubs.tau2 import Tau2Env
from llmrl.envs.hubs.verifiers import VerifiersEnv
from llmrl.envs.tasks.reasoning_gym import ReasoningGymEnv
from llmrl.envs.tasks.task import TASKS, Dataset

ENTRY_POINTS = "llmrl.environments"
"""Group of entry points by which an installed package announces environments."""

HUBS: Mapping[str, tuple[Callable[..., EnvBase], str]] = {
    "gymnasium": (GymnasiumEnv, "ID, a registered environment of gymnasium, played in text"),
    "harbor": (HarborEnv, "FOLDER, tasks in the form of Harbor or terminal-bench, judged by their tests in a sandbox"),
    "miniwob": (MiniWoBEnv, "TASK, a web task of MiniWoB++ in Chromium, judged by its page"),
    "reasoning-gym": (ReasoningGymEnv, "DATASET, generated problems of reasoning-gym, scored by its own scorers"),
    "tau2": (Tau2Env, "DOMAIN, conversations of tau2-bench with a simulated customer, judged by its evaluator"),
    "verifiers": (VerifiersEnv, "TASKSET, an environment of verifiers, in a process of its own"),
}
"""Maker and description of the names that begin with `KEY:`; the rest of the name is the maker's first argument."""


@dataclass(frozen=True, slots=True)
class NamedEnv:
    """A named environment, and the function that makes it."""

    name: str
    make: Callable[..., object]
    origin: str
    """`llmrl`, a key of `HUBS`, a distribution with its version, or a file."""
    about: str = ""
    is_foreign: bool = False
    """Whether `make` comes from a package or a file, so it need not take `split`, `repeats`, `data` and `seed`."""

    @property
    def argument_names(self) -> tuple[str, ...]:
        """Names of the arguments of `make`."""
        return keywords_of(self.make) or tuple(parameters_of(self.make))

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits of the data that `make` accepts; empty if it takes no split."""
        return ("train", "test") if "split" in self.argument_names else ()


def task_environments() -> dict[str, str]:
    """Return a one-line description of each task environment, by name.

    Example:
        >>> task_environments()["gsm8k"]
        'word problems of grade-school mathematics'
    """
    return {name: line for name, (_, line) in TASKS.items()}


def announced_environments() -> dict[str, EntryPoint]:
    """Return the environments that installed packages announce, by their names `PACKAGE/NAME`; import none of them.

    A package announces a function or class that returns an environment in its `pyproject.toml`:

        [project.entry-points."llmrl.environments"]
        NAME = "module:function"

    Raises ValueError if a name is announced with two different functions.
    """
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINTS):
        assert point.dist is not None  # entry points are read from installed distributions
        name = f"{canonicalize_name(point.dist.name)}/{point.name}"
        other = found.setdefault(name, point)
        if other.value != point.value:
            raise ValueError(
                f"the environment {name!r} is announced twice, as {other.value!r} by {origin_of(other)} and as "
                f"{point.value!r} by {origin_of(point)}: uninstall one of them."
            )
    return dict(sorted(found.items()))


def origin_of(point: EntryPoint) -> str:
    """Return the distribution of an installed package's entry point, and its version."""
    assert point.dist is not None
    return f"{point.dist.name} {point.dist.version}"


def is_env_name(name: str) -> bool:
    """Return whether `make_task_env` knows a name; no file is executed, and no package imported."""
    return (
        own_function(name) is not None
        or _hub_of(name) in HUBS
        or name in TASKS
        or _announced_as(name) in announced_environments()
    )


def find_env(name: str) -> NamedEnv:
    """Return the environment of a name; its file is executed, or its package imported.

    Raises the errors of `make_task_env` for names, files and packages.

    Example:
        >>> find_env("addition").origin
        'llmrl'
    """
    if (own := own_function(name)) is not None:
        return NamedEnv(name, load_function(*own), str(own[0]), is_foreign=True)
    hub = _hub_of(name)
    if hub in HUBS:
        make, about = HUBS[hub]
        return NamedEnv(name, functools.partial(make, name.removeprefix(f"{hub}:")), hub, about)
    if name in TASKS:
        make, about = TASKS[name]
        return NamedEnv(name, make, "llmrl", about)
    if (point := announced_environments().get(_announced_as(name))) is None:
        raise ValueError(_unknown(name))
    try:
        return NamedEnv(name, point.load(), origin_of(point), point.value, is_foreign=True)
    except Exception as error:  # importing a package may raise any exception
        raise ImportError(
            f"the environment {name!r}, {point.value!r} of {origin_of(point)}, cannot be imported: {describe(error)}"
        ) from error


def _hub_of(name: str) -> str:
    return name.partition(":")[0] if ":" in name else ""


def _announced_as(name: str) -> str:
    package, _, rest = name.partition("/")
    return f"{canonicalize_name(package)}/{rest}"


def _unknown(name: str) -> str:
    announced = announced_environments()
    known = [*TASKS, *(f"{hub}:{about.partition(',')[0]}" for hub, (_, about) in HUBS.items()), *announced]
    same = [one for one in announced if one.partition("/")[2] == name]
    near = same or [one for one in (nearest(name, known),) if one is not None]
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "Name your own environment FILE.py:FUNCTION."
    return f"there is no task environment {name!r}, only {', '.join(known)}. {hint}"


def make_task_env(
    name: str, /, split: str = "train", *, data: Dataset | None = None, repeats: int = 1, **options: object
) -> EnvBase:
    """Make a task environment by its name, or with your own function.

    Args:
        name: a name in `task_environments()`, `PACKAGE/NAME` of an installed package (`announced_environments`),
            `HUB:NAME` of another library (`HUBS`), or `FILE.py:FUNCTION`. A package's and your own
            function, which return an environment, are called with the options, and with `split`,
            `repeats`, `data` and `seed` if they have such parameters.
        split: `train`, `test`, or a split of the hub's dataset, such as `train[:-100]`.
        data: your own problems: a hub name, a file or folder, or rows.
        repeats: group size, the number of conversations per problem.
        **options: keyword arguments of the environment's `make_…_env`.

    Raises:
        ValueError: if the name is unknown, or if `data` is given to an environment that generates its problems.
        FileNotFoundError: if the file does not exist.
        ImportError: if the package raises an error when it is imported.
        TypeError: if an option is unknown.

    Example:
        >>> make_task_env("countdown", "test", repeats=4, num_count=3).reset()[0]["rollout", "group_id"]
        'test/0/0'
        >>> make_task_env("countdown", num_counts=3)
        Traceback (most recent call last):
        TypeError: CountdownEnv has no argument 'num_counts'; did you mean 'num_count'?
    """
    found = find_env(name)
    if data is not None and "data" not in found.argument_names:
        raise ValueError(f"data is given, but the environment {name!r} makes its own problems: it takes no data.")
    given: dict[str, object] = {"split": split, "repeats": repeats}
    if data is not None:
        given["data"] = data
    if found.is_foreign:
        given["seed"] = options.pop("seed", 0)
        known = keywords_of(found.make)
        given = {key: value for key, value in given.items() if key in found.argument_names}
        if known is not None:
            refuse_unknown(f"the environment {name!r}", options, known)
    env = found.make(**given, **options)
    if not isinstance(env, EnvBase):
        raise TypeError(f"the environment {name!r} must be an EnvBase, but its function returned {type(env).__name__}.")
    return env


def load_function(path: Path, name: str) -> Callable[..., object]:
    """Run a Python file and return its function `name`.

    Raises FileNotFoundError if there is no such file, and ValueError if it has no such function.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r} to take the function {name!r} from.")
    place = path.resolve()
    module_name = f"llmrl_own_{place.stem}_{zlib.crc32(str(place).encode()):08x}"  # several folders have a task.py
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # it is a Python file
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)  # so that pickle finds its classes
    spec.loader.exec_module(module)
    make = getattr(module, name, None)
    if not callable(make):
        functions = [key for key, value in vars(module).items() if callable(value) and value.__module__ == module_name]
        raise ValueError(f"{path} has no function {name!r}; it has {', '.join(functions) or 'none'}.")
    return make
