"""Tools: what a model may call, and the transforms that answer its calls."""

from llmrl.sandbox.launch import IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService, PythonResult
from llmrl.tools.browser import BrowserTransform
from llmrl.tools.in_order import (
    ExecuteToolsInOrder,
    JSONCallParser,
    SimpleToolTransform,
    ToolCall,
    ToolRegistry,
    ToolService,
    XMLBlockParser,
)
from llmrl.tools.mcp import MCPToolTransform
from llmrl.tools.python_interpreter import PythonInterpreter
from llmrl.tools.search import SearchIndex
from llmrl.tools.session import ToolSession, outcomes_of, states_of
from llmrl.tools.tool import InstanceTools, Tool, ToolError, function_tool
from llmrl.tools.transform import ToolTransform

__all__ = [
    "BrowserTransform",
    "ExecuteToolsInOrder",
    "InstanceTools",
    "IsolationError",
    "JSONCallParser",
    "MCPToolTransform",
    "PythonExecutorService",
    "PythonInterpreter",
    "PythonLimits",
    "PythonResult",
    "SearchIndex",
    "SimpleToolTransform",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolRegistry",
    "ToolService",
    "ToolSession",
    "ToolTransform",
    "XMLBlockParser",
    "function_tool",
    "outcomes_of",
    "states_of",
]
