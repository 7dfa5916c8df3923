"""Transfer of new weights to running engines; imports are lazy, as vLLM's workers lack some packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl._utils.lazy_names import lazy_getattr

if TYPE_CHECKING:
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

if not TYPE_CHECKING:
    # Each module also has names that it imports from others; those with the fewest imports come first.
    __getattr__ = lazy_getattr(
        __name__,
        __all__,
        "llmrl.weight_sync.source",
        "llmrl.weight_sync.channels",
        "llmrl.weight_sync.scheme",
        "llmrl.weight_sync.sync",
        "llmrl.weight_sync.in_process",
    )
