"""Optional dependencies: imported where used, and missed with a sentence that says how to install them."""

from __future__ import annotations

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package that only some of llmrl needs is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Import an optional module, or say which extra brings it.

    Args:
        module: dotted name of the module, as in an import statement.
        extra: the extra of llmrl's `pyproject.toml` that installs it.

    Raises MissingExtraError if the package is absent; one that fails to import otherwise raises its own error.

    Example:
        >>> require("json", extra="tools").loads("[1]")
        [1]
        >>> require("no_such_package", extra="tools")
        Traceback (most recent call last):
        ...
        llmrl._utils.imports.MissingExtraError: this needs the package 'no_such_package', which is not ...
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # If a dependency of that package is missing, installing our extra would not help.
        package = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"this needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'llmrl[{extra}]'",
            name=package,
        ) from error
