"""TorchRL's namespaces with llmrl's classes, and classes that exist only for TorchRL's calls.

After `import llmrl.torchrl as torchrl`, `torchrl.envs.llm.ChatEnv` and the other names of TorchRL's
LLM layer are llmrl's. Names outside of that layer are TorchRL's own.
"""

from typing import TYPE_CHECKING

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        import importlib

        if name in {"collectors", "data", "envs", "modules", "objectives", "weight_update"}:
            return importlib.import_module(f"{__name__}.{name}")
        return getattr(importlib.import_module("torchrl"), name)
