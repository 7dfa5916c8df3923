"""Reinforcement learning of language models the TensorDict way.

The names below load the module that defines them when first used, so that `import llmrl` is quick and imports neither
vLLM nor Ray nor any of transformers' models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llmrl.embedded_model import ensure_embedded_model

# Public name -> the module that defines it. The imports above are for type checkers and editors only;
# `test/test_structure.py` checks that both list the same.
_EXPORTS = {
    "ensure_embedded_model": "llmrl.embedded_model",
}

__all__ = ["__version__", "ensure_embedded_model"]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'llmrl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
