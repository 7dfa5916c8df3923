"""The names of `torchrl.envs.llm.transforms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.data import as_nested_tensor, as_padded_tensor
from llmrl.envs import DataLoadingPrimer, RayDataLoadingPrimer
from llmrl.torchrl.names import namespace
from llmrl.transforms import (
    AddThinkingPrompt,
    BrowserTransform,
    ExecuteToolsInOrder,
    IncrementalTokenizer,
    JSONCallParser,
    KLComputation,
    KLRewardTransform,
    MCPToolTransform,
    PolicyVersion,
    PythonExecutorService,
    PythonInterpreter,
    RetrieveKL,
    RetrieveLogProb,
    SimpleToolTransform,
    TemplateTransform,
    Tokenizer,
    ToolCall,
    ToolRegistry,
    ToolService,
    XMLBlockParser,
)

__all__ = [
    "AddThinkingPrompt",
    "BrowserTransform",
    "DataLoadingPrimer",
    "ExecuteToolsInOrder",
    "IncrementalTokenizer",
    "JSONCallParser",
    "KLComputation",
    "KLRewardTransform",
    "MCPToolTransform",
    "PolicyVersion",
    "PythonExecutorService",
    "PythonInterpreter",
    "RayDataLoadingPrimer",
    "RetrieveKL",
    "RetrieveLogProb",
    "SimpleToolTransform",
    "TemplateTransform",
    "Tokenizer",
    "ToolCall",
    "ToolRegistry",
    "ToolService",
    "XMLBlockParser",
    "as_nested_tensor",
    "as_padded_tensor",
]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
