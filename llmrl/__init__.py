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

# Public name -> the module that exports it. The imports above are for type checkers and editors
# only; `test/project/test_structure.py` checks that both agree.
_EXPORTS = {
    "AgentEnv": "llmrl.envs",
    "AsyncVLLM": "llmrl.engines",
    "ChatEnv": "llmrl.envs",
    "DatasetChatEnv": "llmrl.envs",
    "EngineReplicas": "llmrl.engines",
    "GRPOLoss": "llmrl.objectives",
    "History": "llmrl.data",
    "GroupRules": "llmrl.collectors",
    "LLMCollector": "llmrl.collectors",
    "RayLLMCollector": "llmrl.collectors",
    "MCAdvantage": "llmrl.objectives",
    "MessageChatEnv": "llmrl.envs",
    "MessageEnv": "llmrl.envs",
    "MessageStep": "llmrl.envs",
    "MixedEnv": "llmrl.envs",
    "PolicyVersion": "llmrl.transforms",
    "RewardFn": "llmrl.rewards",
    "RolloutLimits": "llmrl.collectors",
    "RolloutStatus": "llmrl.data",
    "Rubric": "llmrl.rewards",
    "RubricReward": "llmrl.transforms",
    "SamplingConfig": "llmrl.engines",
    "ServerEngine": "llmrl.engines",
    "TransformersEngine": "llmrl.engines",
    "TransformersWrapper": "llmrl.trainer",
    "VLLMWeightSyncScheme": "llmrl.weight_sync",
    "ensure_embedded_model": "llmrl.testing",
    "get_model_metadata": "llmrl.weight_sync",
    "train": "llmrl.scripts.train",
    "train_step": "llmrl.trainer.train_step",
    "vLLMWrapper": "llmrl.policies",
}

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
