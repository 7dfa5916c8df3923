"""`MCPToolTransform`: the tools of Model Context Protocol servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from llmrl._utils.imports import require
from llmrl.data.message import encodable
from llmrl.tools.mcp_transport import MCPServer, make_client
from llmrl.tools.output import as_text
from llmrl.tools.tool import Tool, ToolError
from llmrl.tools.transform import OutputOptions, ToolTransform

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp import types as mcp_types


_ASK_AGAIN_SECONDS = 5.0
MAX_TOOLS = 1000
"""Tools per server."""
MAX_NAME_CHARS = 128
"""The protocol's limit."""
MAX_SCHEMA_CHARS = 32_000
"""Characters of a tool's description and schema, about 10,000 tokens."""


class MCPToolTransform(ToolTransform):
    """Offers the model the tools of MCP servers, as `SERVER.TOOL`.

    A message has at most 8 MiB, and a server at most 1,000 tools. A lost connection is reopened. The interrupted call
    is repeated if its tool is marked as read-only or idempotent; otherwise the model reads that the outcome is unknown.

    Args:
        servers: servers by name: `command`, `args`, `env` and `cwd` of a program that communicates over its standard
            streams (its environment has only `env`, paths and names), or `url` and `headers` of an HTTP server.
        tool_name, timeout, max_parallel_calls, **output: as for `ToolTransform`.
        connect_timeout: seconds for a server to start and list its tools.

    Raises:
        MissingExtraError: if the `tools` extra is not installed.
        ValueError: if a server's description is invalid, or a tool's name or description is too long.
        ConnectionError: if a server cannot be reached or has too many tools.
    """

    def __init__(
        self,
        servers: Mapping[str, MCPServer],
        *,
        tool_name: str = "tool",
        timeout: float = 30.0,
        connect_timeout: float = 30.0,
        max_parallel_calls: int = 8,
        **output: Unpack[OutputOptions],
    ) -> None:
        super().__init__(tool_name=tool_name, timeout=timeout, max_parallel_calls=max_parallel_calls, **output)
        require("mcp", extra="tools")
        if not servers:
            raise ValueError("servers is empty; name at least one.")
        self.servers = {name: _check_server(name, server) for name, server in servers.items()}
        self.connect_timeout = connect_timeout
        self._connections: dict[str, _Connection] = {}
        try:
            self._home = self.loop
            self._set_tools(self._home.run(self._connect_all()))
        except BaseException:
            self.close()
            raise

    async def _connect_all(self) -> list[Tool]:
        self._connections = {
            name: _Connection(name, server, self.connect_timeout) for name, server in self.servers.items()
        }
        listed = await asyncio.gather(*(connection.open() for connection in self._connections.values()))
        tools = []
        for (server, connection), descriptions in zip(self._connections.items(), listed, strict=True):
            tools += [_tool(server, connection, description) for description in descriptions]
        return tools

    def close(self) -> None:
        """Disconnect, and end the programs that were started. May be called twice."""
        if self._home is not None and not self._home.is_closed:
            connections = list(self._connections.values())
            self._connections = {}

            async def close_all() -> None:
                await asyncio.gather(*(connection.close() for connection in connections))

            self._home.run(close_all())
        super().close()

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("an MCPToolTransform is bound to its connections; make one in each process.")


class _Connection:
    """One server and the task that opens and closes its connection; both must happen in the same task."""

    def __init__(self, name: str, server: MCPServer, connect_timeout: float) -> None:
        self._name = name
        self._server = server
        self._connect_timeout = connect_timeout
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._reopening = asyncio.Lock()
        self.num_opened = 0
        self._is_forgotten = False  # whether the server has lost the session

    def _forget(self) -> None:
        self._is_forgotten = True

    async def open(self) -> list[mcp_types.Tool]:
        """Connect, and return the server's tools. Raises ConnectionError if the server cannot be reached."""
        ready: asyncio.Future[list[mcp_types.Tool]] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(ready, self._leave))
        try:
            async with asyncio.timeout(self._connect_timeout):
                tools = await asyncio.shield(ready)
        except TimeoutError:
            self._task.cancel()
            await self.close()
            raise ConnectionError(
                f"MCP server {self._name!r} did not answer within {self._connect_timeout:g} s."
            ) from None
        except Exception as error:
            await self.close()
            raise ConnectionError(f"MCP server {self._name!r} cannot be reached: {_describe(error)}") from error
        self.num_opened += 1
        return tools

    async def _hold(self, ready: asyncio.Future[list[mcp_types.Tool]], leave: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._is_forgotten = False
                client = await make_client(self._server, stack, when_forgotten=self._forget)
                self._client = await stack.enter_async_context(client)
                tools = []
                cursor = None
                for num_pages in itertools.count(1):
                    page = await self._client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if max(len(tools), num_pages) > MAX_TOOLS:
                        raise ValueError(f"it lists more than {MAX_TOOLS} tools, or pages of them.")
                    if not cursor:
                        break
                ready.set_result(tools)
                await leave.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(_describe(error)))
        finally:
            self._client = None

    async def call(self, tool: str, arguments: dict[str, object], *, is_repeatable: bool) -> mcp_types.CallToolResult:
        """Return the result of a call. Raises ToolError with a message for the model."""
        from mcp import MCPError

        for is_last in (False, True):
            number = self.num_opened
            try:
                if self._client is None:
                    await self._reopen(number)
                assert self._client is not None
                return await self._client.call_tool(tool, arguments)
            except MCPError as error:
                if not await self._is_lost(error):
                    raise ToolError(error.error.message) from error
            except ConnectionError as error:
                raise ToolError(str(error)) from error
            except Exception as error:  # of the transport: anyio, httpx
                if isinstance(error, ValueError):
                    raise
            try:
                await self._reopen(number)
            except ConnectionError as error:
                raise ToolError(str(error)) from error
            if is_last or not is_repeatable:
                raise ToolError(
                    f"the connection to server {self._name!r} was lost during the call, and is open again; "
                    "whether the call took effect is unknown."
                )
        raise AssertionError("unreachable")

    async def _is_lost(self, error: MCPError) -> bool:
        """Return whether the connection is lost; sends a request, because servers may use the same error code."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        if self._is_forgotten or self._client is None:
            return True
        if error.error.code != CONNECTION_CLOSED:
            return False
        try:
            async with asyncio.timeout(_ASK_AGAIN_SECONDS):
                await self._client.list_tools()
        except MCPError as refusal:
            return refusal.error.code == CONNECTION_CLOSED
        except Exception:  # of the transport, or the timeout
            return True
        return False

    async def _reopen(self, number: int) -> None:
        async with self._reopening:
            if self.num_opened == number:  # no other call has reopened it
                await self.close()
                await self.open()

    async def close(self) -> None:
        """Disconnect."""
        task = self._task
        self._task = None
        if task is None:
            return
        self._leave.set()
        done, _ = await asyncio.wait([task], timeout=5)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=5)


def _check_server(name: str, server: MCPServer) -> MCPServer:
    unknown = sorted(set(server) - set(MCPServer.__annotations__))
    if unknown:
        raise ValueError(f"server {name!r} has {unknown}; known are {list(MCPServer.__annotations__)}.")
    if ("command" in server) == ("url" in server):
        raise ValueError(f"server {name!r} needs exactly one of 'command' and 'url', got {sorted(server)}.")
    misplaced = sorted({"args", "env", "cwd"} & set(server) if "url" in server else {"headers"} & set(server))
    if misplaced:
        raise ValueError(
            f"server {name!r} has {misplaced}, which do not go with {'url' if 'url' in server else 'command'!r}."
        )
    return server.copy()


def _tool(server: str, connection: _Connection, description: mcp_types.Tool) -> Tool:
    _check_description(server, description)
    hints = description.annotations
    is_repeatable = bool(hints and (hints.read_only_hint or hints.idempotent_hint))

    async def run(arguments: dict[str, object], conversation_id: str) -> str:
        result = await connection.call(description.name, arguments, is_repeatable=is_repeatable)
        text = result_text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    name = f"{server}.{description.name}"
    text = description.description or description.title or ""
    return Tool(name, encodable(text), encodable(dict(description.input_schema)), run)


def _check_description(server: str, description: mcp_types.Tool) -> None:
    name = description.name
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"MCP server {server!r} names a tool {name[:MAX_NAME_CHARS]!r}, of {len(name)} characters; "
            f"1 to {MAX_NAME_CHARS} printable ones are expected."
        )
    num_chars = sum(
        map(len, (description.description or "", description.title or "", as_text(description.input_schema)))
    )
    if num_chars > MAX_SCHEMA_CHARS:
        raise ValueError(
            f"MCP server {server!r} describes its tool {name!r} with {num_chars} characters, with its schema; at "
            f"most {MAX_SCHEMA_CHARS} go into a prompt. Leave the server out, or put one with shorter ones before it."
        )


def result_text(result: mcp_types.CallToolResult) -> str:
    """Return a result as text: its content, with descriptions of media, or else its structured content."""
    parts = [_content_text(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [as_text(result.structured_content)]
    return "\n".join(parts)


def _content_text(content: mcp_types.ContentBlock) -> str:
    if content.type == "text":
        return content.text
    if content.type in ("image", "audio"):
        return f"[{content.type}: {content.mime_type}, {_num_bytes(content.data)} bytes]"
    if content.type == "resource_link":
        described = f": {content.description}" if content.description else ""
        return f"[resource: {content.name}, {content.uri}{described}]"
    if content.type == "resource":
        resource = content.resource
        if hasattr(resource, "text"):
            return f"[resource: {resource.uri}]\n{resource.text}"
        return f"[resource: {resource.uri}, {resource.mime_type or 'binary'}, {_num_bytes(resource.blob)} bytes]"
    return f"[{content.type}]"


def _num_bytes(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
