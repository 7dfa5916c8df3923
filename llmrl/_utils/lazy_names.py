"""Lazy re-exports of names from modules that import the package itself."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection


def lazy_getattr(package: str, names: Collection[str], *modules: str) -> Callable[[str], object]:
    """Return a package's `__getattr__`, which imports the modules when one of the names is used."""

    def get(name: str) -> object:
        if name in names:
            for module in map(importlib.import_module, modules):
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
