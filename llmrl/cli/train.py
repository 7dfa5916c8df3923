"""`llmrl train` and `llmrl demo`: the GRPO script, for your own environment or a task of its configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from llmrl._utils.imports import own_function
from llmrl._utils.json_values import as_entry_value, from_yaml

MODULE = "llmrl.scripts.grpo"


def run_script(entries: Sequence[str]) -> NoReturn:
    """Replace this process by the script, so that Ctrl-C and signals reach the training itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *entries])


def entries_of(words: Sequence[str]) -> list[str]:
    """Return the script's entries for the arguments of `llmrl train`.

    A first argument FILE.py:FUNCTION becomes `env.name`, with the entries of `task/own.yaml`, then
    those of FILE.yaml if there is one. Entries on the command line come last, so they win.

    Raises:
        FileNotFoundError: if there is no file FILE.py.
        ValueError: if FUNCTION is missing, or if FILE.yaml is not a mapping in YAML with
            names that hydra reads.
    """
    if not words or words[0].startswith("-"):
        return list(words)
    own = own_function(words[0])
    if "=" in words[0] and (own is None or not own[0].is_file()):  # an entry; paths may contain this character, too
        return list(words)
    if own is None or not own[1]:
        raise ValueError(
            f"llmrl train {words[0]}: give an environment of your own, FILE.py:FUNCTION, or a task, task=gsm8k."
        )
    if not own[0].is_file():
        raise FileNotFoundError(f"there is no file {str(own[0])!r} to take the environment {words[0]!r} from.")
    return ["task=own", f"env.name={as_entry_value(words[0])}", *_entries_beside(own[0]), *words[1:]]


def _entries_beside(file: Path) -> list[str]:
    path = file.with_suffix(".yaml")
    if not path.is_file():
        return []
    try:
        found = from_yaml(path.read_text(encoding="utf-8")) or {}
    except ValueError as error:
        raise ValueError(f"{path} must be valid YAML: {error}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must contain sections with entries, such as collect: {{group_size: 8}}.")
    entries: dict[str, object] = {}
    for name, value in found.items():
        if isinstance(value, dict):  # below the second level, names may be any text
            entries |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            entries[str(name)] = value
    return [_entry_of(name, value, path) for name, value in entries.items()]


def _entry_of(name: str, value: object, path: Path) -> str:
    """Return an override for an entry of FILE.yaml. Raises ValueError if hydra does not read it as it was written."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    entry = f"++{name}={as_entry_value(value)}"
    try:
        (read,) = OverridesParser.create().parse_overrides([entry])
        is_read = repr((read.key_or_group, read.value())) == repr((name, value))  # NaN equals nothing
    except HydraException:
        is_read = False
    if is_read:
        return entry
    raise ValueError(
        f"{path}: {name} has a name that hydra cannot read on a command line: use letters, digits and _, and a letter "
        "first; read problems with other columns from a file, env.data=FILE.json."
    )
