"""The names of `torchrl.collectors.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.collectors import RayLLMCollector
from llmrl.torchrl.collectors.collector import LLMCollector
from llmrl.torchrl.names import namespace

__all__ = ["LLMCollector", "RayLLMCollector"]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
