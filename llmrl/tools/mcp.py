"""`MCPToolTransform`: the tools of Model Context Protocol servers."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require
from llmrl._utils.threads import run_in_thread
from llmrl._utils.types import Row
from llmrl.data.message import encodable
from llmrl.tools.mcp_connection import Answer, MCPConnection, pages
from llmrl.tools.mcp_transport import HOW_TO_START, MCPServer
from llmrl.tools.output import as_text
from llmrl.tools.tool import InvalidArguments, Tool, ToolError, text_parameters
from llmrl.tools.transform import OutputOptions, ToolTransform

if TYPE_CHECKING:
    from mcp import Client
    from mcp import types as mcp_types

MAX_NAME_CHARS = 128
"""The protocol's limit on the length of a tool's name."""
MAX_SCHEMA_CHARS = 32_000
"""Maximum number of characters of a tool's description and schema, about 10,000 tokens."""
MAX_PAGES = 100
"""Maximum number of pages of a list of resources."""
_FOLDER = "{folder}"


class MCPToolTransform(ToolTransform):
    """Offers the model the tools of MCP servers, as `SERVER.TOOL`.

    A message may have at most 8 MiB, and a server at most 1,000 tools. A connection is reopened if it is lost, or if
    the server stays silent after a call was cancelled. The interrupted call is repeated if its tool is marked as
    read-only or idempotent; otherwise the answer tells the model that the outcome is unknown.

    All conversations share a server, unless it has `per_conversation`: then each conversation has its own server, which
    runs in a new folder. `{folder}` in its `args`, `env` and `cwd` stands for that folder. Rewards read the folder, a
    `Path`, by the server's name; it is removed when the conversation has ended and was scored.

    Args:
        servers: servers by name: `command`, `args`, `env` and `cwd` of a program that communicates over its standard
            streams (its environment has only `env` and a few variables such as `PATH` and `HOME`), or `url` and
            `headers` of an HTTP server; and `resources`, `per_conversation`, `prepare` (`MCPServer`).
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
        self._connected: list[_Connections] = []
        try:
            self._home = self.loop
            self._set_tools(self._home.run(self._connect_all(self._home)))
        except BaseException:
            self.close()
            raise

    async def _connect_all(self, home: BackgroundLoop) -> list[Tool]:
        self._connected = [
            _Connections(name, server, self.connect_timeout, home) for name, server in self.servers.items()
        ]
        listed = await asyncio.gather(*(connections.tools() for connections in self._connected))
        return list(itertools.chain(*listed))

    def close(self) -> None:
        """Disconnect, and end the programs that were started. May be called twice."""
        if self._home is not None and not self._home.is_closed:
            connected = self._connected
            self._connected = []

            async def close_all() -> None:
                await asyncio.gather(*(connections.close() for connections in connected))

            self._home.run(close_all())
        super().close()

    def __getstate__(self) -> dict[str, object]:
        raise TypeError(
            "an MCPToolTransform cannot be pickled: it is bound to its connections; make one in each process."
        )


class _Connections:
    """The connections to one server: a shared one, or one for each conversation."""

    def __init__(self, name: str, server: MCPServer, connect_timeout: float, home: BackgroundLoop) -> None:
        self.name = name
        self.is_shared = not server.get("per_conversation")
        self._server = server
        self._connect_timeout = connect_timeout
        self._home = home
        self._open: dict[str, asyncio.Task[_Opened]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def tools(self) -> list[Tool]:
        """Return the server's tools. A server that is not shared is started only to list them."""
        opened = await self._opened("", {})
        if not self.is_shared:
            await self._end("")
        made = [_tool(self, description) for description in opened.listed]
        if self._server.get("resources"):
            made += [_list_resources(self), _read_resource(self)]
        for name, count in Counter(tool.name for tool in made).items():
            if count > 1:
                raise ValueError(f"MCP server {self.name!r} has {count} tools named {name!r}; leave the server out.")
        if self.is_shared:
            return made
        state_name = re.sub(r"\W", "_", self.name)
        return [replace(one, open=self.open, release=self.release, state_name=state_name) for one in made]

    async def ask(
        self, conversation_id: str, send: Callable[[Client], Awaitable[Answer]], *, is_repeatable: bool
    ) -> Answer:
        """Return the server's answer to the request that `send` makes. Raises ToolError for the model."""
        opened = await self._opened("" if self.is_shared else conversation_id, {})
        return await opened.connection.ask(send, is_repeatable=is_repeatable)

    async def open(self, conversation_id: str, row: Row) -> Path:
        """Start the server of a conversation, and return its folder."""
        opened = await self._opened(conversation_id, row)
        assert opened.folder is not None
        return opened.folder

    async def _opened(self, conversation_id: str, row: Row) -> _Opened:
        if conversation_id not in self._open:
            self._open[conversation_id] = asyncio.create_task(self._start(row))
        # A cancelled call must not cancel the start.
        return await asyncio.shield(self._open[conversation_id])

    async def _start(self, row: Row) -> _Opened:
        if self.is_shared:
            connection = MCPConnection(self.name, self._server, self._connect_timeout)
            return _Opened(connection, await connection.open())
        folder = Path(await run_in_thread(tempfile.mkdtemp, prefix="llmrl-mcp-"))
        try:
            if (prepare := self._server.get("prepare")) is not None:
                await run_in_thread(prepare, folder, row)
            connection = MCPConnection(self.name, _in_folder(self._server, folder), self._connect_timeout)
            return _Opened(connection, await connection.open(), folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def release(self, conversation_id: str) -> Future[None] | None:
        """End the server of a conversation."""
        if self._home.is_closed:
            return None
        return asyncio.run_coroutine_threadsafe(self._end(conversation_id), self._home.loop)

    async def _end(self, conversation_id: str) -> None:
        if (starting := self._open.pop(conversation_id, None)) is not None:
            ending = asyncio.create_task(self._close(starting))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            await asyncio.shield(ending)

    async def _close(self, starting: asyncio.Task[_Opened]) -> None:
        await asyncio.wait([starting])
        if starting.cancelled() or starting.exception() is not None:
            return
        opened = starting.result()
        await opened.connection.close()
        if opened.folder is not None:
            await run_in_thread(shutil.rmtree, opened.folder, ignore_errors=True)

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*map(self._end, list(self._open)), *self._ending)


@dataclass(frozen=True, slots=True)
class _Opened:
    """An open connection, the listed tools, and the folder of a conversation's own server."""

    connection: MCPConnection
    listed: list[mcp_types.Tool]
    folder: Path | None = None


def _in_folder(server: MCPServer, folder: Path) -> MCPServer:
    """Return a server's description with the path of a folder in place of `{folder}`."""
    if "command" not in server:
        return server

    def placed(text: str) -> str:
        return text.replace(_FOLDER, str(folder))

    own = server.copy()
    own["args"] = [placed(text) for text in server.get("args", [])]
    own["env"] = {name: placed(text) for name, text in server.get("env", {}).items()}
    own["cwd"] = placed(server.get("cwd", _FOLDER))
    return own


def _check_server(name: str, server: MCPServer) -> MCPServer:
    known = list(MCPServer.__annotations__)
    if unknown := sorted(set(server) - set(known)):
        raise ValueError(f"server {name!r} has unknown entries {unknown}; known are {known}.")
    if ("command" in server) == ("url" in server):
        raise ValueError(f"server {name!r} needs exactly one of 'command' and 'url', got {sorted(server)}.")
    if "prepare" in server and not server.get("per_conversation"):
        raise ValueError(f"server {name!r} has 'prepare', which requires 'per_conversation': True.")
    for way, entries in (("command", ("headers",)), ("url", HOW_TO_START)):
        if way in server and (misplaced := sorted(set(entries) & set(server))):
            raise ValueError(f"server {name!r} has {misplaced}, which cannot be combined with {way!r}.")
    return server.copy()


def _tool(connections: _Connections, description: mcp_types.Tool) -> Tool:
    _check_description(connections.name, description)
    hints = description.annotations
    is_repeatable = bool(hints and (hints.read_only_hint or hints.idempotent_hint))

    async def run(arguments: dict[str, object], conversation_id: str) -> str:
        result = await connections.ask(
            conversation_id, lambda client: client.call_tool(description.name, arguments), is_repeatable=is_repeatable
        )
        text = result_text(result)
        if result.is_error:
            raise ToolError(text)
        return text

    name = f"{connections.name}.{description.name}"
    text = description.description or description.title or ""
    return Tool(name, encodable(text), encodable(dict(description.input_schema)), run)


def _list_resources(connections: _Connections) -> Tool:
    async def run(arguments: dict[str, object], conversation_id: str) -> str:
        return "\n".join(await connections.ask(conversation_id, _resource_lines, is_repeatable=True)) or "none"

    description = "List the resources, and the forms of URIs of further ones."
    return Tool(f"{connections.name}.list_resources", description, {"type": "object", "properties": {}}, run)


async def _resource_lines(client: Client) -> list[str]:
    """Return a line for each resource and template, from at most `MAX_PAGES` pages of either."""
    lines = []
    async for page in pages(client.list_resources, MAX_PAGES):
        lines += [_line(resource.uri, resource.name, resource.description) for resource in page.resources]
    async for forms in pages(client.list_resource_templates, MAX_PAGES):
        lines += [_line(form.uri_template, form.name, form.description) for form in forms.resource_templates]
    return lines


def _line(uri: str, name: str, description: str | None) -> str:
    return f"{uri} ({name})" + (f": {description}" if description else "")


def _read_resource(connections: _Connections) -> Tool:
    async def run(arguments: dict[str, object], conversation_id: str) -> str:
        uri = arguments.get("uri")
        if not isinstance(uri, str):
            raise InvalidArguments(f"uri must be a text, got {uri!r:.100}")
        read = await connections.ask(conversation_id, lambda client: client.read_resource(uri), is_repeatable=True)
        return "\n".join(map(_resource_text, read.contents))

    return Tool(f"{connections.name}.read_resource", "Read a resource.", text_parameters("uri", "its URI"), run)


def _check_description(server: str, description: mcp_types.Tool) -> None:
    name = description.name
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise ValueError(
            f"MCP server {server!r} names a tool {name[:MAX_NAME_CHARS]!r}, of {len(name)} characters; "
            f"expected 1 to {MAX_NAME_CHARS} printable characters."
        )
    texts = (description.description or "", description.title or "", as_text(description.input_schema))
    num_chars = sum(map(len, texts))
    if num_chars > MAX_SCHEMA_CHARS:
        raise ValueError(
            f"MCP server {server!r} describes its tool {name!r} with {num_chars} characters, including the schema; at "
            f"most {MAX_SCHEMA_CHARS} are allowed. Leave the server out, or wrap it in one with shorter descriptions."
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
        return _resource_text(content.resource)
    return f"[{content.type}]"


def _resource_text(resource: mcp_types.TextResourceContents | mcp_types.BlobResourceContents) -> str:
    if hasattr(resource, "text"):
        return f"[resource: {resource.uri}]\n{resource.text}"
    return f"[resource: {resource.uri}, {resource.mime_type or 'binary'}, {_num_bytes(resource.blob)} bytes]"


def _num_bytes(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
