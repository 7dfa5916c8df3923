"""Transforms that extend a `ChatEnv`."""

from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward

__all__ = ["PolicyVersion", "RubricReward"]
