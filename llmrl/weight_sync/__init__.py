"""New weights from a trainer into running engines."""

from __future__ import annotations

from llmrl.weight_sync.channels import Channel, FileChannel, MemoryChannel
from llmrl.weight_sync.engine_group import EngineGroup
from llmrl.weight_sync.in_process import InProcessSyncScheme, default_scheme
from llmrl.weight_sync.scheme import DoubleBufferReader, VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
from llmrl.weight_sync.source import get_model_metadata
from llmrl.weight_sync.stream import StreamChannel
from llmrl.weight_sync.sync import WeightSync, WeightSyncError

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
