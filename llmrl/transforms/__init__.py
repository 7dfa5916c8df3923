"""Transforms that extend a `ChatEnv`."""

from llmrl.transforms.incremental_tokenizer import IncrementalTokenizer
from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, dataset_columns, find_rubric_reward, write_score
from llmrl.transforms.tools import PythonExecutorService, PythonInterpreter, ToolTransform

__all__ = [
    "IncrementalTokenizer",
    "PolicyVersion",
    "PythonExecutorService",
    "PythonInterpreter",
    "RubricReward",
    "ToolTransform",
    "dataset_columns",
    "find_rubric_reward",
    "write_score",
]
