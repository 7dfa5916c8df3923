"""Errors for unknown arguments, with the nearest known name, and for invalid values of arguments."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from types import SimpleNamespace
from typing import Self, Unpack, get_args, get_origin, get_type_hints

from llmrl._utils.other_libraries import EXPLAINED, SAMPLING, SYNONYMS, instead_of


def refuse_unknown(
    owner: str, given: Iterable[str], known: Iterable[str], explained: Mapping[str, str] | None = None
) -> None:
    """Raise TypeError for the first unknown name, with the nearest known one.

    Args:
        explained: advice for names from other libraries; by default `instead_of(owner)`.

    Example:
        >>> refuse_unknown("make_env", ["num_digit"], ["num_digits", "seed"])
        Traceback (most recent call last):
        TypeError: make_env has no argument 'num_digit'; did you mean 'num_digits'?
    """
    known = list(known)
    explained = instead_of(owner) if explained is None else explained
    for name in given:
        if name in known:
            continue
        if name in explained:
            raise TypeError(f"{owner} has no argument {name!r}: {explained[name]}.")
        if "generate_kwargs" in known and name in SAMPLING:
            hint = f"sampling is chosen by generate_kwargs={{{SYNONYMS.get(name, (name,))[0]!r}: ...}}."
        elif "repeats" in SYNONYMS.get(name, ()) and nearest(name, known) is None:
            hint = "the answers to a prompt are the environment's, DatasetChatEnv(rows, repeats=8)."
        else:
            hint = near_or_all(name, known, f"known are {sorted(known)}.")
        raise TypeError(f"{owner} has no argument {name!r}; {hint}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name of the same meaning, or the most similar one unless another library has this name, or None.

    Example:
        >>> nearest("wnadb", ["tensorboard", "wandb"]), nearest("beta", ["kl_to_ref_coeff", "seed"])
        ('wandb', 'kl_to_ref_coeff')
    """
    known = list(known)
    for synonym in SYNONYMS.get(name, ()):
        if synonym in known:
            return synonym
    if name in SYNONYMS or name in EXPLAINED:  # a name that is spelled similarly has another meaning
        return None
    return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def near_or_all(name: str, known: Collection[str], listed: str) -> str:
    """Return a question with the nearest known name, or `listed`, a sentence with all of them, if no name is near."""
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else listed


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question with the nearest known name, to append to a sentence; empty if no name is near.

    Example:
        >>> did_you_mean("wnadb", ["tensorboard", "wandb"])
        " Did you mean 'wandb'?"
    """
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


def keywords_of(function: Callable[..., object]) -> tuple[str, ...] | None:
    """Return the keywords of a function, including those of a typed `**options`; None if it may accept any keyword."""
    names: list[str] = []
    for parameter in parameters_of(function).values():
        if parameter.kind is parameter.VAR_KEYWORD:
            if parameter.annotation == "Never":  # the function itself refuses unknown arguments
                continue
            # Resolve this annotation alone: the others may use names that only type checkers import.
            alone = SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
            names_of_module = getattr(inspect.unwrap(_called(function)), "__globals__", {})  # absent for functions in C
            try:
                hint = get_type_hints(alone, names_of_module).get(parameter.name)
            except NameError:  # only type checkers import the name
                return None
            if get_origin(hint) is not Unpack:
                return None
            names += get_args(hint)[0].__annotations__
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(parameter.name)
    return tuple(names)


def parameters_of(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, or of a class's `__init__`, without `self`; a metaclass is ignored."""
    parameters = inspect.signature(_called(function)).parameters
    return {name: parameter for name, parameter in parameters.items() if name != "self"}


def _called(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function that reads the arguments."""
    if isinstance(function, functools.partial):
        return _called(function.func)
    if isinstance(function, type) and "__signature__" not in vars(function):
        return getattr(function, "__init__")  # noqa: B009  # type checkers refuse `function.__init__`
    return function


def check_least(least: int, **values: int | None) -> None:
    """Raise ValueError if an argument, given by its name, is no whole number from `least`; None is not checked.

    Example:
        >>> check_least(1, num_epochs=None, num_samples=0)
        Traceback (most recent call last):
        ValueError: num_samples must be at least 1, got 0.
        >>> check_least(0, num_retries=2.5)
        Traceback (most recent call last):
        ValueError: num_retries must be a whole number, got 2.5.
    """
    for name, value in values.items():
        if value is None:
            continue
        if not isinstance(value, Integral):
            raise ValueError(f"{name} must be a whole number, got {value!r}.")
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")


def check_positive(**values: float | None) -> None:
    """Raise ValueError if an argument, given by its name, is not positive; None is not checked."""
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, got {value}.")


def check_not_negative(**values: float | None) -> None:
    """Raise ValueError if an argument, given by its name, is negative or not finite; None is not checked."""
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}.")


def check_choice(choices: Collection[object], **values: object) -> None:
    """Raise ValueError if an argument, given by its name, is not one of the choices."""
    for name, value in values.items():
        if value not in choices or (value in (0, 1) and type(value) not in map(type, choices)):  # 1 equals True
            raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")


_keywords_of_class = functools.cache(keywords_of)  # for classes, which are hashable, as functions need not be


class KnownArguments:
    """Base of classes with a constructor that first refuses unknown keywords."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        called: Callable[..., object] = cls
        known = _keywords_of_class(called)
        if known is not None:
            refuse_unknown(cls.__name__, kwargs, known, instead_of(*(base.__name__ for base in cls.__mro__)))
        make = super().__new__
        return make(cls) if make is object.__new__ else make(cls, *args, **kwargs)
