"""An MCP server for the tests: `python mcp_server.py stdio`, or `python mcp_server.py http PORT`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import sys

from mcp.server.mcpserver import Audio, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import BlobResourceContents, EmbeddedResource, ResourceLink, TextResourceContents, ToolAnnotations

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def run_python_code(python_code: str) -> str:
    """Run Python code, and return what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(python_code, {})
    return printed.getvalue()


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def process_id() -> str:
    """The server's process id."""
    return str(os.getpid())


@server.tool()
def secret() -> str:
    """What the server sees of the environment of the process that started it."""
    return os.environ.get("LLMRL_TEST_SECRET", "none")


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("the database is closed")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def die_once(path: str) -> str:
    """End the server unless a file says that it ended already."""
    if not os.path.exists(path):  # noqa: PTH110
        open(path, "w").close()  # noqa: PTH123
        os._exit(1)
    return "alive"


@server.tool()
def show() -> list:
    """One of each kind of content."""
    return [
        "words",
        Image(data=b"12345", format="png"),
        Audio(data=b"123", format="wav"),
        ResourceLink(type="resource_link", name="report", uri="file:///report.txt", description="of May"),
        EmbeddedResource(type="resource", resource=TextResourceContents(uri="file:///a.txt", text="inside")),
        EmbeddedResource(type="resource", resource=BlobResourceContents(uri="file:///b.bin", blob="MTIzNA==")),
    ]


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        server.run("stdio")
    else:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[2]))
