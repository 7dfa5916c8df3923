"""Transforms that extend a `ChatEnv`."""

from typing import TYPE_CHECKING

from llmrl._utils.lazy_names import lazy_getattr
from llmrl.data.tensordicts import dataset_columns
from llmrl.tools import (
    BrowserTransform,
    MCPToolTransform,
    PythonExecutorService,
    PythonInterpreter,
    SearchIndex,
    ToolTransform,
    outcomes_of,
    states_of,
)
from llmrl.transforms.incremental_tokenizer import IncrementalTokenizer
from llmrl.transforms.kl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb
from llmrl.transforms.parts import environment_parts, is_ours, reads_turns
from llmrl.transforms.policy_version import PolicyVersion
from llmrl.transforms.reward import RubricReward, find_rubric_rewards, joint_rubric, write_score

if TYPE_CHECKING:
    from llmrl.torchrl.envs.tools import (
        ExecuteToolsInOrder,
        JSONCallParser,
        SimpleToolTransform,
        ToolCall,
        ToolRegistry,
        ToolService,
        XMLBlockParser,
    )
    from llmrl.torchrl.envs.transforms import AddThinkingPrompt, TemplateTransform, Tokenizer

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

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, __all__, "llmrl.torchrl.envs.tools", "llmrl.torchrl.envs.transforms")
