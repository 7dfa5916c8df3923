"""Imports of optional packages, and names of functions in a user's files."""

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
        # llmrl's extra would not install a missing dependency of that package.
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'llmrl[{extra}]'",
            name=package,
        ) from error


def own_function(name: str) -> tuple[Path, str] | None:
    """Return the file and the function of a name `FILE.py:FUNCTION`; None for any other name.

    Example:
        >>> own_function("tasks/sums.py:env"), own_function("verifiers:wordle")
        ((PosixPath('tasks/sums.py'), 'env'), None)
    """
    file, _, function = name.rpartition(":")
    return (Path(file), function) if file.endswith(".py") else None
