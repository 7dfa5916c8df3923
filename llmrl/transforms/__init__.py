"""Transforms that extend a `ChatEnv`."""

from llmrl.transforms.incremental_tokenizer import IncrementalTokenizer
from llmrl.transforms.kl import KLComputation, RetrieveKL, RetrieveLogProb
from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, dataset_columns, find_rubric_reward, write_score
from llmrl.transforms.thinking import AddThinkingPrompt
from llmrl.transforms.tools import (
    BrowserTransform,
    MCPToolTransform,
    PythonExecutorService,
    PythonInterpreter,
    SearchIndex,
    ToolTransform,
)

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "IncrementalTokenizer",
    "KLComputation",
    "MCPToolTransform",
    "PolicyVersion",
    "PythonExecutorService",
    "PythonInterpreter",
    "RetrieveKL",
    "RetrieveLogProb",
    "RubricReward",
    "SearchIndex",
    "ToolTransform",
    "dataset_columns",
    "find_rubric_reward",
    "write_score",
]
