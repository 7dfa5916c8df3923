"""Imports of optional dependencies, with the command that installs them in the error."""

from __future__ import annotations

import importlib
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
