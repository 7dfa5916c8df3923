"""Transforms that extend a `ChatEnv`."""

from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, dataset_columns, find_rubric_reward, write_score

__all__ = ["PolicyVersion", "RubricReward", "dataset_columns", "find_rubric_reward", "write_score"]
