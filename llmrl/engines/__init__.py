"""Who generates: one small protocol over vLLM, in child processes, Ray actors and servers, and scripted engines."""

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
from llmrl.engines.ray_engine import RayEngine
from llmrl.engines.replicas import EngineReplicas
from llmrl.engines.router import NoReplicaError, Router
from llmrl.engines.scripted import ScriptedEngine
from llmrl.engines.server import ServerEngine
from llmrl.engines.vllm import AsyncVLLM

__all__ = [
    "AsyncVLLM",
    "Completion",
    "Engine",
    "EngineError",
    "EngineReplicas",
    "FinishReason",
    "NoReplicaError",
    "PauseMode",
    "RayEngine",
    "Router",
    "SamplingConfig",
    "ScriptedEngine",
    "ServerEngine",
    "completion_budget",
]
