"""Tools: what a model may call, and the transforms that answer its calls."""

from llmrl.sandbox.launch import IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService, PythonResult
from llmrl.transforms.tools.browser import BrowserTransform
from llmrl.transforms.tools.mcp import MCPToolTransform
from llmrl.transforms.tools.python_interpreter import PythonInterpreter
from llmrl.transforms.tools.search import SearchIndex
from llmrl.transforms.tools.session import ToolSession
from llmrl.transforms.tools.tool import Tool, ToolError, class_tools, function_tool
from llmrl.transforms.tools.transform import ToolTransform

__all__ = [
    "BrowserTransform",
    "IsolationError",
    "MCPToolTransform",
    "PythonExecutorService",
    "PythonInterpreter",
    "PythonLimits",
    "PythonResult",
    "SearchIndex",
    "Tool",
    "ToolError",
    "ToolSession",
    "ToolTransform",
    "class_tools",
    "function_tool",
]
