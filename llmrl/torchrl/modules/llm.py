"""The names of `torchrl.modules.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.data import ChatHistory, LogProbs, Masks, Text, Tokens
from llmrl.engines import AsyncVLLM
from llmrl.policies import LLMWrapperBase
from llmrl.torchrl.modules.trl import HFRewardModelWrapper, TorchRLBufferDataset
from llmrl.torchrl.modules.wrappers import TransformersWrapper, vLLMWrapper
from llmrl.torchrl.names import namespace

__all__ = [
    "AsyncVLLM",
    "ChatHistory",
    "HFRewardModelWrapper",
    "LLMWrapperBase",
    "LogProbs",
    "Masks",
    "Text",
    "Tokens",
    "TorchRLBufferDataset",
    "TransformersWrapper",
    "vLLMWrapper",
]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
