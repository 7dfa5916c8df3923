"""Who generates: one small protocol over vLLM and scripted engines."""

from __future__ import annotations

from llmrl.engines.base import (
    Completion,
    Engine,
    EngineError,
    FinishReason,
    SamplingConfig,
    completion_budget,
)
from llmrl.engines.replicas import EngineReplicas
from llmrl.engines.scripted import ScriptedEngine
from llmrl.engines.vllm import AsyncVLLM

__all__ = [
    "AsyncVLLM",
    "Completion",
    "Engine",
    "EngineError",
    "EngineReplicas",
    "FinishReason",
    "SamplingConfig",
    "ScriptedEngine",
    "completion_budget",
]
