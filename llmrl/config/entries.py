"""Validation of configuration entries; their allowed values are declared with the fields."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from llmrl._utils.arguments import did_you_mean, keywords_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
Metadata = Mapping[str, object]
"""Metadata of a dataclass field: `field(default=1, metadata=at_least(1))`."""

_ALLOWED = "allowed"
_KINDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a dict",
}


# What is converted to each type, and what is not although it is an instance of that.
_CONVERTED: dict[type, tuple[type, type]] = {int: (Integral, bool), float: (Real, bool), list: (Sequence, str)}


class EntryError(ValueError):
    """An entry has an invalid value; `problem` names the expected and the given value."""

    def __init__(self, entry: str, problem: str) -> None:
        super().__init__(f"{entry} {problem}")
        self.entry = entry
        self.problem = problem


@dataclasses.dataclass(frozen=True, slots=True)
class Allowed:
    """Allowed values of an entry, in addition to its type."""

    says: str
    """Description of the values, which follows "must be" in messages."""
    includes: Callable[..., bool]
    choices: tuple[str, ...] = ()
    """All allowed values, if they can be listed."""


def at_least(low: float) -> Metadata:
    """Declare the minimum.

    Example:
        >>> @dataclasses.dataclass
        ... class Pages(Section):
        ...     section: ClassVar[str] = "pages"
        ...     count: int = dataclasses.field(default=1, metadata=at_least(1))
        >>> Pages(count=0)
        Traceback (most recent call last):
        ...
        llmrl.config.entries.EntryError: pages.count must be at least 1, got 0.
    """
    return {_ALLOWED: Allowed(f"at least {low:g}", lambda value: value >= low)}


def above(low: float, *, at_most: float = math.inf) -> Metadata:
    """Declare an exclusive lower bound, and optionally the maximum."""
    says = f"above {low:g}" if at_most == math.inf else f"above {low:g} and at most {at_most:g}"
    return {_ALLOWED: Allowed(says, lambda value: low < value <= at_most)}


def within(low: float, high: float) -> Metadata:
    """Declare the minimum and the maximum."""
    return {_ALLOWED: Allowed(f"from {low:g} to {high:g}", lambda value: low <= value <= high)}


def one_of(*choices: str) -> Metadata:
    """Declare all allowed values."""
    return {_ALLOWED: Allowed(f"one of {', '.join(choices)}", lambda value: value in choices, choices)}


def matching(pattern: str, says: str) -> Metadata:
    """Declare a regular expression for a text; `says` follows "must be" in messages."""
    return {_ALLOWED: Allowed(says, lambda value: re.fullmatch(pattern, value) is not None)}


def any_value(reason: str) -> Metadata:
    """Declare that every value of the type is allowed, and why."""
    return {_ALLOWED: Allowed("", lambda value: True), "reason": reason}


NAMED: Metadata = matching(r"[^\0]*[^\s\0][^\0]*", "non-empty text")
"""Metadata of names and paths."""


class Section:
    """Section of a configuration. Its entries are checked on construction, and numbers become Python's types.

    A subclass calls its base's `__post_init__` by name: a slotted dataclass is a new class, so `super()` fails.
    """

    __slots__ = ()
    section: ClassVar[str] = ""
    """Prefix of the entries' names."""

    def __post_init__(self) -> None:
        assert dataclasses.is_dataclass(self)
        check_entries(self, self.section)

    def arguments_of(self, function: Callable[..., object]) -> dict[str, Any]:
        """Return the entries with the name of a keyword argument of a function or class."""
        assert dataclasses.is_dataclass(self)
        known = keywords_of(function) or ()
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name in known}


def check_entries(section: DataclassInstance, name: str) -> None:
    """Check all entries of a dataclass against their types and declarations; `name` is the prefix of their names.

    Replaces numpy numbers by Python's, and tuples by lists. Raises EntryError if a value is invalid.
    """
    kinds = types_of(type(section))
    for field in dataclasses.fields(section):
        entry = ".".join(filter(None, (name, field.name)))
        value = getattr(section, field.name)
        kept = _checked(entry, value, kinds[field.name], field.metadata.get(_ALLOWED))
        if kept is not value:
            setattr(section, field.name, kept)


def from_entries(config_type: type[Config], entries: Mapping[str, object]) -> Config:
    """Build a configuration from entries with dotted names.

    Example:
        >>> from llmrl.config.sections import RunConfig
        >>> from_entries(RunConfig, {"path": "runs/one", "trackers": ["wandb"]}).trackers
        ['wandb']
    """
    arguments: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    for name, value in entries.items():
        section, _, rest = name.partition(".")
        if rest:
            sections.setdefault(section, {})[rest] = value
        else:
            arguments[name] = value
    kinds = types_of(config_type)
    return config_type(**arguments, **{name: from_entries(kinds[name], inner) for name, inner in sections.items()})


def all_entries(
    config_type: type[DataclassInstance], prefix: str = ""
) -> Iterator[tuple[str, dataclasses.Field[object]]]:
    """Yield the dotted names and fields of all entries, including those of sections."""
    kinds = types_of(config_type)
    for field in dataclasses.fields(config_type):
        if dataclasses.is_dataclass(kinds[field.name]):
            yield from all_entries(kinds[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field


def entries_by_name(config_type: type[DataclassInstance]) -> dict[str, str]:
    """Return the dotted names of entries by their last parts; of equal last parts, the first entry wins.

    Example:
        >>> from llmrl.config.sections import GRPOConfig
        >>> [entries_by_name(GRPOConfig)[name] for name in ("seed", "learning_rate", "every")]
        ['seed', 'train.learning_rate', 'eval.every']
    """
    names = [name for name, _ in all_entries(config_type)]
    return {name.rpartition(".")[2]: name for name in reversed(names)}


def choices_of(config_type: type[DataclassInstance]) -> dict[str, tuple[str, ...]]:
    """Return the allowed values of all entries that list them, by dotted name."""
    allowed = {name: field.metadata.get(_ALLOWED) for name, field in all_entries(config_type)}
    return {name: one.choices for name, one in allowed.items() if isinstance(one, Allowed) and one.choices}


@functools.cache
def types_of(owner: object) -> dict[str, Any]:
    """Return the types of a dataclass's entries by name."""
    return get_type_hints(owner)


def _checked(entry: str, value: object, hint: object, allowed: Allowed | None) -> object:
    """Return a value converted to the type of its entry. Raises EntryError if the value is invalid."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kind = next(option for option in options if option is not type(None))
    null = " or null" if type(None) in options else ""
    if value is None and null:
        return None
    item_kinds = get_args(kind)
    kind = get_origin(kind) or kind
    if kind not in _KINDS:  # a section, or a value that its user checks
        if dataclasses.is_dataclass(kind) and isinstance(kind, type) and not isinstance(value, kind):
            raise EntryError(entry, f"must be a {kind.__name__}, got {value!r}.")
        return value
    kept = _as_kind(value, kind)
    if kept is None:
        says = _KINDS[kind] + (f", {allowed.says}" if allowed is not None and allowed.says else "")
        hint = f": write [{value!r}]" if kind is list and isinstance(value, str) else f", a {type(value).__name__}"
        raise EntryError(entry, f"must be {says}{null}; got {value!r}{hint}.")
    if isinstance(kept, list):
        if not kept and allowed is not None and not allowed.choices:
            raise EntryError(entry, f"must have an item, {allowed.says}; got [].")
        return [_checked(f"{entry}[{place}]", item, item_kinds[0], allowed) for place, item in enumerate(kept)]
    if isinstance(kept, dict):
        for key, item in kept.items():
            if dataclasses.is_dataclass(item) and not isinstance(item, type):
                check_entries(item, f"{entry}.{key}")
        return kept
    if isinstance(kept, float) and not math.isfinite(kept):
        raise EntryError(entry, f"must be a finite number{null}, got {value!r}.")
    if allowed is not None and not allowed.includes(kept):
        comma = ";" if allowed.choices else ","
        meant = did_you_mean(str(kept), allowed.choices)
        raise EntryError(entry, f"must be {allowed.says}{comma} got {value!r}.{meant}")
    return kept


def _as_kind(value: object, kind: type) -> object:
    """Convert a value to Python's own type; return None if it has another type."""
    taken, refused = _CONVERTED.get(kind, (kind, ()))
    if not isinstance(value, taken) or isinstance(value, refused):
        return None
    return kind(value) if kind in _CONVERTED else value
