"""Transforms that extend a `ChatEnv`."""

from llmrl.data.tensordicts import dataset_columns
from llmrl.tools import (
    BrowserTransform,
    ExecuteToolsInOrder,
    JSONCallParser,
    MCPToolTransform,
    PythonExecutorService,
    PythonInterpreter,
    SearchIndex,
    SimpleToolTransform,
    ToolCall,
    ToolRegistry,
    ToolService,
    ToolTransform,
    XMLBlockParser,
    outcomes_of,
    states_of,
)
from llmrl.transforms.incremental_tokenizer import IncrementalTokenizer
from llmrl.transforms.kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from llmrl.transforms.parts import environment_parts, is_ours, reads_turns
from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, find_rubric_rewards, joint_rubric, write_score
from llmrl.transforms.template import TemplateTransform
from llmrl.transforms.thinking import AddThinkingPrompt
from llmrl.transforms.tokenizer import Tokenizer

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "ExecuteToolsInOrder",
    "IncrementalTokenizer",
    "JSONCallParser",
    "KLComputation",
    "KLRewardTransform",
    "MCPToolTransform",
    "PolicyVersion",
    "PythonExecutorService",
    "PythonInterpreter",
    "RetrieveKL",
    "RetrieveLogProb",
    "RubricReward",
    "SearchIndex",
    "SimpleToolTransform",
    "TemplateTransform",
    "Tokenizer",
    "ToolCall",
    "ToolRegistry",
    "ToolService",
    "ToolTransform",
    "XMLBlockParser",
    "dataset_columns",
    "environment_parts",
    "find_rubric_rewards",
    "is_ours",
    "joint_rubric",
    "outcomes_of",
    "reads_turns",
    "states_of",
    "write_score",
]
