"""The names of `torchrl.weight_update.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.torchrl.names import namespace
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, get_model_metadata

__all__ = ["VLLMDoubleBufferSyncScheme", "VLLMWeightSyncScheme", "get_model_metadata"]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
