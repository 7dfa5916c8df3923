"""Tools that a model may call, and the transforms that answer the calls."""

from typing import TYPE_CHECKING

from llmrl._utils.lazy_names import lazy_getattr
from llmrl.sandbox.base import Sandbox, SandboxResult
from llmrl.sandbox.command import ContainerSandbox, SSHSandbox
from llmrl.sandbox.confined import ConfinedSandbox
from llmrl.sandbox.daytona import DaytonaSandbox
from llmrl.sandbox.e2b import E2BSandbox
from llmrl.sandbox.launch import IsolationError, PythonLimits
from llmrl.sandbox.modal import ModalSandbox
from llmrl.sandbox.service import PythonExecutorService, PythonResult
from llmrl.tools.browser import BrowserTransform
from llmrl.tools.http import HttpTool, StopTool
from llmrl.tools.mcp import MCPToolTransform
from llmrl.tools.output import FileRefPart, ImagePart, JsonPart, TextPart, ToolResult, ToolResultPart
from llmrl.tools.python_interpreter import PythonInterpreter
from llmrl.tools.rate_limit import RateLimiter
from llmrl.tools.sandboxes import ConversationSandbox, FileReadTool, Sandboxes, SandboxExecutor, ShellTool
from llmrl.tools.search import SearchIndex
from llmrl.tools.session import ToolSession, outcomes_of, states_of
from llmrl.tools.tool import InstanceTools, StopSignal, Tool, ToolError, function_tool
from llmrl.tools.transform import ToolTransform

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

__all__ = [
    "BrowserTransform",
    "ConfinedSandbox",
    "ContainerSandbox",
    "ConversationSandbox",
    "DaytonaSandbox",
    "E2BSandbox",
    "ExecuteToolsInOrder",
    "FileReadTool",
    "FileRefPart",
    "HttpTool",
    "ImagePart",
    "InstanceTools",
    "IsolationError",
    "JSONCallParser",
    "JsonPart",
    "MCPToolTransform",
    "ModalSandbox",
    "PythonExecutorService",
    "PythonInterpreter",
    "PythonLimits",
    "PythonResult",
    "RateLimiter",
    "SSHSandbox",
    "Sandbox",
    "SandboxExecutor",
    "SandboxResult",
    "Sandboxes",
    "SearchIndex",
    "ShellTool",
    "SimpleToolTransform",
    "StopSignal",
    "StopTool",
    "TextPart",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolRegistry",
    "ToolResult",
    "ToolResultPart",
    "ToolService",
    "ToolSession",
    "ToolTransform",
    "XMLBlockParser",
    "function_tool",
    "outcomes_of",
    "states_of",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, __all__, "llmrl.torchrl.envs.tools")
