"""Transforms that extend a `ChatEnv`."""

from llmrl.transforms.incremental_tokenizer import IncrementalTokenizer
from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, dataset_columns, find_rubric_reward, write_score

__all__ = [
    "IncrementalTokenizer",
    "PolicyVersion",
    "RubricReward",
    "dataset_columns",
    "find_rubric_reward",
    "write_score",
]
