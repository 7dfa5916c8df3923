"""Connections to MCP servers with limits on messages, and detection of lost sessions."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypedDict

from llmrl._utils.types import Row

if TYPE_CHECKING:
    from mcp import Client
    from typing_extensions import Buffer

MAX_MESSAGE_BYTES = 8 << 20
"""Maximum size of a server's message; to parse one of this size takes tens of milliseconds."""
_ENCODING = "utf_8_in_bounded_lines"
_TIMEOUT_S = 30.0
_READ_TIMEOUT_S = 300.0
"""Defaults of the SDK's client."""
_TOO_LONG = f"the server sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB."
_ID = re.compile(rb'"id"\s*:\s*("[^"\\\\]*"|[0-9]{1,15})\s*[,}]')
_NUM_KEPT_ERRORS = 1000
"""Number of bytes of standard error that are kept."""
_NUM_ID_BYTES = 256
"""Number of bytes at the beginning of a message that are searched for its id."""


class MCPServer(TypedDict, total=False):
    """Description of a server: `command` with its options, or `url` and `headers`; and options for its use."""

    command: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    url: str
    headers: dict[str, str]
    resources: bool
    """Whether the model may list and read the server's resources, through two further tools."""
    per_conversation: bool
    """Whether each conversation has a server of its own."""
    prepare: Callable[[Path, Row], object]
    """Function that is called with the folder and the dataset row of a conversation before its own server starts; the
    row is empty when the tools are listed."""


HOW_TO_START = ("command", "args", "env", "cwd")


async def make_client(
    server: MCPServer, stack: contextlib.AsyncExitStack, *, when_forgotten: Callable[[], None], errors: KeptErrors
) -> Client:
    """Return a client of the official SDK.

    Args:
        when_forgotten: function that is called if an HTTP server has lost the session.
        errors: receiver of a program's standard error.
    """
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    if "command" in server:
        given = {key: value for key, value in server.items() if key in HOW_TO_START}
        parameters = StdioServerParameters.model_validate({**given, "encoding": _ENCODING})
        return Client(stdio_client(parameters, stack.enter_context(await errors.opened())), cache=None)
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    class Bounded(httpx2.AsyncByteStream):
        """The body of a response, which fails at the limit."""

        def __init__(self, stream: httpx2.AsyncByteStream) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            num_bytes = 0
            async for part in self._stream:
                num_bytes += len(part)
                if num_bytes > MAX_MESSAGE_BYTES:
                    raise httpx2.StreamError(_TOO_LONG)
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    async def look(response: httpx2.Response) -> None:
        # 404 to a request with a session id: the session has ended.
        if response.status_code == 404 and "mcp-session-id" in response.request.headers:
            when_forgotten()
        # None was requested, and the limit applies to decoded bytes.
        response.headers.pop("content-encoding", None)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = Bounded(response.stream)

    http_client = httpx2.AsyncClient(
        headers={"accept-encoding": "identity", **server.get("headers", {})},
        timeout=httpx2.Timeout(_TIMEOUT_S, read=_READ_TIMEOUT_S),
        event_hooks={"response": [look]},
    )
    await stack.enter_async_context(http_client)
    transport = streamable_http_client(server["url"], http_client=http_client, max_sse_event_size=MAX_MESSAGE_BYTES)
    return Client(transport, cache=None)


class KeptErrors(asyncio.Protocol):
    """The end of a program's standard error; the rest is read and discarded."""

    def __init__(self) -> None:
        self._kept = b""

    async def opened(self) -> TextIO:
        """Return a file to give to the program."""
        reading, writing = os.pipe()
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(reading, "rb"))
        return os.fdopen(writing, "w")

    def data_received(self, data: bytes) -> None:
        """Keep the end."""
        self._kept = (self._kept + data[-_NUM_KEPT_ERRORS:])[-_NUM_KEPT_ERRORS:]

    def end(self) -> str:
        """Return the end as a part of a message; empty if the program wrote nothing."""
        text = self._kept.decode(errors="replace").strip()
        return f" The end of its errors:\n{text}" if text else ""


class BoundedLines(codecs.IncrementalDecoder):
    """Decoder of UTF-8 with one message per line; the request of a line that is too long gets an error.

    A line that is not a JSON object is left out: some programs write their log to the standard output.

    It is a codec, because the SDK decodes a program's output before it collects lines of any length.
    """

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.max_bytes = MAX_MESSAGE_BYTES
        self._num_bytes = 0
        self._beginning = b""
        self._is_cut = False

    def decode(self, data: Buffer, final: bool = False) -> str:
        """Return the decoded text; a line that is too long is cut and followed by an error."""
        texts = []
        *lines, rest = bytes(data).split(b"\n")
        for piece in (*(line + b"\n" for line in lines), rest):
            self._num_bytes += len(piece)
            self._beginning += piece[: _NUM_ID_BYTES - len(self._beginning)]
            is_object = self._beginning.lstrip().startswith(b"{")
            if not self._is_cut and is_object and self._num_bytes > self.max_bytes:
                self._is_cut = True
                self._decoder.reset()
                texts.append(f"\n{_error_for(self._beginning)}\n")
            elif not self._is_cut and is_object:
                texts.append(self._decoder.decode(piece, final))
            if piece.endswith(b"\n"):
                self._num_bytes = 0
                self._beginning = b""
                self._is_cut = False
        return "".join(texts)


def _error_for(beginning: bytes) -> str:
    """Return the error response to the request of a cut message; "" if the request is unknown."""
    found = _ID.search(beginning)
    if found is None:
        return ""
    return json.dumps({"jsonrpc": "2.0", "id": json.loads(found[1]), "error": {"code": -32603, "message": _TOO_LONG}})


def _find_codec(name: str) -> codecs.CodecInfo | None:
    if name != _ENCODING:
        return None
    utf_8 = codecs.lookup("utf-8")
    return codecs.CodecInfo(utf_8.encode, utf_8.decode, incrementaldecoder=BoundedLines, name=_ENCODING)


codecs.register(_find_codec)
