"""Conversion of arbitrary values to JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from llmrl._utils.failure import describe
from llmrl._utils.types import JSON

# Python cannot write, or cannot read back, deeper nesting and longer integers.
_MAX_DEPTH = 100
_MAX_BITS = 14_000


def as_json(value: object, depth: int = _MAX_DEPTH) -> JSON:
    """Return a value as JSON, with other objects converted to text. Never raises.

    Values nested more than 100 deep become `…`. Lone surrogates are kept: write the text with
    `errors="backslashreplace"`.

    Example:
        >>> as_json({"a": (1, {2}), 3: None})
        {'a': [1, '{2}'], '3': None}
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_BITS else hex(value)
    try:
        if isinstance(value, Mapping | list | tuple) and not depth:
            return "…"
        if isinstance(value, Mapping):
            return {str(key): as_json(entry, depth - 1) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [as_json(entry, depth - 1) for entry in value]
        return str(value)
    except Exception:  # a user's class
        return f"<{type(value).__name__}>"


def finite(value: object) -> object:
    """Return a JSON value with NaN and infinities, which JSON lacks, replaced by None.

    Example:
        >>> finite({"a": (1.0, math.nan), 3: math.inf})
        {'a': [1.0, None], '3': None}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(one) for key, one in value.items()}
    return [finite(one) for one in value] if isinstance(value, list | tuple) else value


def by_dotted_name(value: object, prefix: str = "") -> dict[str, object]:
    """Return the leaves of nested mappings by dotted name; an empty mapping is a leaf.

    Example:
        >>> by_dotted_name({"a": {"b": 1, "c": []}})
        {'a.b': 1, 'a.c': []}
    """
    if not isinstance(value, Mapping) or not value:
        return {prefix: value}
    leaves: dict[str, object] = {}
    for key, part in value.items():
        leaves |= by_dotted_name(part, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def from_yaml(text: str) -> object:
    """Return the value of a YAML text as configurations have it, where 1e-3 is a number and a date is text.

    Raises ValueError if the text is not valid YAML, or has values that JSON does not have, such as `!!binary`.

    Example:
        >>> from_yaml("1e-3"), from_yaml("2024-05-01")
        (0.001, '2024-05-01')
    """
    import yaml
    from omegaconf._utils import (
        get_yaml_loader,  # OmegaConf.create would also read references, which texts may look like
    )

    try:
        value: object = yaml.load(text, Loader=get_yaml_loader())
        json.dumps(value)
    except Exception as error:  # a value that does not match its tag raises errors of various types
        raise ValueError(" ".join(describe(error).split())) from error
    return value


def without_references(value: Any) -> Any:
    r"""Return a value as OmegaConf must be given it, so that it reads each `${` in a text as these two characters.

    Example:
        >>> print(without_references({"prompt": ["Say ${name}."]})["prompt"][0])
        Say \${name}.
    """
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: without_references(entry) for key, entry in value.items()}
    return [without_references(one) for one in value] if isinstance(value, list | tuple) else value


def as_entry_value(value: object) -> str:
    """Return a value of JSON as hydra reads it in an entry NAME=VALUE.

    Example:
        >>> print(as_entry_value(["runs/a=b", 1, {"a": None}]))
        ['runs/a=b',1,{a:null}]
    """
    if isinstance(value, str):
        # Hydra reads a doubled backslash only before a quote, including the closing quote.
        return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), value) + "'"
    if isinstance(value, list):
        return f"[{','.join(map(as_entry_value, value))}]"
    if isinstance(value, Mapping):  # hydra reads no quoted keys
        return f"{{{','.join(f'{_as_key(key)}:{as_entry_value(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, float):
        return str(value)  # JSON's Infinity is text for hydra
    return json.dumps(value)


def _as_key(key: object) -> str:
    return re.sub(r"[\\()\[\]{}:=, \t]", r"\\\g<0>", str(key))
