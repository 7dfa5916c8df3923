"""Transfer of new weights to running engines; imports are lazy, as vLLM's workers lack the trainer's dependencies."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrl.weight_sync.channels import Channel, FileChannel, MemoryChannel
    from llmrl.weight_sync.engine_group import EngineGroup
    from llmrl.weight_sync.in_process import InProcessSyncScheme, default_scheme
    from llmrl.weight_sync.scheme import DoubleBufferReader, VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
    from llmrl.weight_sync.source import get_model_metadata
    from llmrl.weight_sync.stream import StreamChannel
    from llmrl.weight_sync.sync import WeightSync, WeightSyncError

_MODULES = {
    "Channel": "channels",
    "DoubleBufferReader": "scheme",
    "EngineGroup": "engine_group",
    "FileChannel": "channels",
    "InProcessSyncScheme": "in_process",
    "MemoryChannel": "channels",
    "StreamChannel": "stream",
    "VLLMDoubleBufferSyncScheme": "scheme",
    "VLLMWeightSyncScheme": "scheme",
    "WeightSync": "sync",
    "WeightSyncError": "sync",
    "default_scheme": "in_process",
    "get_model_metadata": "source",
}

__all__ = [
    "Channel",
    "DoubleBufferReader",
    "EngineGroup",
    "FileChannel",
    "InProcessSyncScheme",
    "MemoryChannel",
    "StreamChannel",
    "VLLMDoubleBufferSyncScheme",
    "VLLMWeightSyncScheme",
    "WeightSync",
    "WeightSyncError",
    "default_scheme",
    "get_model_metadata",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
