"""The names of `torchrl.envs.llm.agentic`, a toolkit that TorchRL develops in a branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.tools import (
    FileReadTool,
    FileRefPart,
    HttpTool,
    ImagePart,
    JsonPart,
    RateLimiter,
    Sandbox,
    SandboxResult,
    ShellTool,
    StopSignal,
    StopTool,
    TextPart,
    Tool,
    ToolError,
    ToolResult,
    ToolResultPart,
)
from llmrl.torchrl.names import namespace

__all__ = [
    "FileReadTool",
    "FileRefPart",
    "HttpTool",
    "ImagePart",
    "JsonPart",
    "RateLimiter",
    "Sandbox",
    "SandboxResult",
    "ShellTool",
    "StopSignal",
    "StopTool",
    "TextPart",
    "Tool",
    "ToolError",
    "ToolResult",
    "ToolResultPart",
]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
