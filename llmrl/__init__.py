"""Reinforcement learning of language models with TensorDict.

Names are imported on first use, so `import llmrl` is fast and does not import vLLM, Ray or transformers' models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from llmrl.collectors import GroupRules, LLMCollector, RayLLMCollector, RolloutLimits
    from llmrl.data import History, RolloutStatus
    from llmrl.engines import AsyncVLLM, EngineReplicas, SamplingConfig, ServerEngine, TransformersEngine
    from llmrl.envs import AgentEnv, ChatEnv, DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep, MixedEnv
    from llmrl.objectives import GRPOLoss, MCAdvantage
    from llmrl.policies import vLLMWrapper
    from llmrl.rewards import RewardFn, Rubric
    from llmrl.scripts.train import train
    from llmrl.testing import ensure_embedded_model
    from llmrl.trainer import TransformersWrapper
    from llmrl.trainer.train_step import train_step
    from llmrl.transforms import PolicyVersion, RubricReward
    from llmrl.weight_sync import VLLMWeightSyncScheme, get_model_metadata

# The imports above are for type checkers and editors only; `test/project/test_structure.py` checks that both agree.
_NAMES_OF_MODULES = {
    "llmrl.collectors": ("GroupRules", "LLMCollector", "RayLLMCollector", "RolloutLimits"),
    "llmrl.data": ("History", "RolloutStatus"),
    "llmrl.engines": ("AsyncVLLM", "EngineReplicas", "SamplingConfig", "ServerEngine", "TransformersEngine"),
    "llmrl.envs": ("AgentEnv", "ChatEnv", "DatasetChatEnv", "MessageChatEnv", "MessageEnv", "MessageStep", "MixedEnv"),
    "llmrl.objectives": ("GRPOLoss", "MCAdvantage"),
    "llmrl.policies": ("vLLMWrapper",),
    "llmrl.rewards": ("RewardFn", "Rubric"),
    "llmrl.scripts.train": ("train",),
    "llmrl.testing": ("ensure_embedded_model",),
    "llmrl.trainer": ("TransformersWrapper",),
    "llmrl.trainer.train_step": ("train_step",),
    "llmrl.transforms": ("PolicyVersion", "RubricReward"),
    "llmrl.weight_sync": ("VLLMWeightSyncScheme", "get_model_metadata"),
}
_EXPORTS = {name: module for module, names in _NAMES_OF_MODULES.items() for name in names}
"""Module that exports each public name."""

__all__ = [
    "AgentEnv",
    "AsyncVLLM",
    "ChatEnv",
    "DatasetChatEnv",
    "EngineReplicas",
    "GRPOLoss",
    "GroupRules",
    "History",
    "LLMCollector",
    "MCAdvantage",
    "MessageChatEnv",
    "MessageEnv",
    "MessageStep",
    "MixedEnv",
    "PolicyVersion",
    "RayLLMCollector",
    "RewardFn",
    "RolloutLimits",
    "RolloutStatus",
    "Rubric",
    "RubricReward",
    "SamplingConfig",
    "ServerEngine",
    "TransformersEngine",
    "TransformersWrapper",
    "VLLMWeightSyncScheme",
    "__version__",
    "ensure_embedded_model",
    "get_model_metadata",
    "train",
    "train_step",
    "vLLMWrapper",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'llmrl' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
