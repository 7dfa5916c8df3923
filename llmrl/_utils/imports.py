"""Imports of optional packages, and the names of functions in files of one's own."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType


class MissingExtraError(ImportError):
    """A package that an optional feature needs is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional module. Raises MissingExtraError if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If a dependency of that package is missing, our extra would not install it.
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'llmrl[{extra}]'",
            name=package,
        ) from error


def own_function(name: str) -> tuple[Path, str] | None:
    """Return the file and the function of `FILE.py:FUNCTION`, or None if a name is another.

    Example:
        >>> own_function("tasks/sums.py:env"), own_function("verifiers:wordle")
        ((PosixPath('tasks/sums.py'), 'env'), None)
    """
    file, _, function = name.rpartition(":")
    return (Path(file), function) if file.endswith(".py") else None
