"""Inference engines: one protocol for vLLM (local, in Ray actors, behind servers) and transformers."""

from __future__ import annotations

from llmrl.engines.base import (
    Completion,
    Engine,
    EngineError,
    FinishReason,
    PauseMode,
    SamplingConfig,
    completion_budget,
)
from llmrl.engines.load import EngineLoad
from llmrl.engines.ray.engine import RayEngine
from llmrl.engines.ray.registry import EngineRegistry
from llmrl.engines.replicas import EngineReplicas
from llmrl.engines.router import NoReplicaError, Router
from llmrl.engines.scores import ScoresTokens, TokenScores
from llmrl.engines.server.engine import ServerEngine
from llmrl.engines.transformers.engine import TransformersEngine
from llmrl.engines.vllm.engine import AsyncVLLM

__all__ = [
    "AsyncVLLM",
    "Completion",
    "Engine",
    "EngineError",
    "EngineLoad",
    "EngineRegistry",
    "EngineReplicas",
    "FinishReason",
    "NoReplicaError",
    "PauseMode",
    "RayEngine",
    "Router",
    "SamplingConfig",
    "ScoresTokens",
    "ServerEngine",
    "TokenScores",
    "TransformersEngine",
    "completion_budget",
]
