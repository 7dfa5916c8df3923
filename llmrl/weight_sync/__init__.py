"""New weights from a trainer into running engines."""

from __future__ import annotations

from llmrl.weight_sync.receiver import VLLMDoubleBufferWeightReceiver, VLLMWeightReceiver
from llmrl.weight_sync.scheme import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError
from llmrl.weight_sync.sender import VLLMDoubleBufferWeightSender, VLLMWeightSender
from llmrl.weight_sync.source import get_model_metadata
from llmrl.weight_sync.transport import VLLMCollectiveTransport, VLLMDoubleBufferTransport

__all__ = [
    "VLLMCollectiveTransport",
    "VLLMDoubleBufferSyncScheme",
    "VLLMDoubleBufferTransport",
    "VLLMDoubleBufferWeightReceiver",
    "VLLMDoubleBufferWeightSender",
    "VLLMWeightReceiver",
    "VLLMWeightSender",
    "VLLMWeightSyncScheme",
    "WeightSyncError",
    "get_model_metadata",
]
