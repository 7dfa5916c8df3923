"""`MCPConnection`: a connection to one MCP server, which is opened again when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from llmrl.tools.mcp_transport import KeptErrors, MCPServer, make_client
from llmrl.tools.tool import ToolError

if TYPE_CHECKING:
    from mcp import Client, MCPError
    from mcp import types as mcp_types

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
Page = TypeVar("Page", bound="mcp_types.PaginatedResult")

_CLOSE_SECONDS = 5.0
_ASK_AGAIN_SECONDS = 5.0
MAX_TOOLS = 1000
"""Maximum number of tools of a server."""


class MCPConnection:
    """One server and the task that opens and closes its connection; both must happen in the same task.

    Args:
        name: name of the server in messages.
        connect_timeout: seconds for the server to start and list its tools, and to answer after a cancelled call.
    """

    def __init__(self, name: str, server: MCPServer, connect_timeout: float) -> None:
        self._name = name
        self._server = server
        self._connect_timeout = connect_timeout
        self._client: Client | None = None
        self._task: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._leave = asyncio.Event()
        self._reopening: asyncio.Task[None] | None = None
        self._errors = KeptErrors()
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
            await self._disconnect()
            why = f"did not answer within {self._connect_timeout:g} s.{self._errors.end()}"
            raise ConnectionError(f"MCP server {self._name!r} {why}") from None
        except Exception as error:
            await self._disconnect()
            why = f"{_describe(error)}{self._errors.end()}"
            raise ConnectionError(f"MCP server {self._name!r} cannot be reached: {why}") from error
        self.num_opened += 1
        return tools

    async def _hold(self, ready: asyncio.Future[list[mcp_types.Tool]], leave: asyncio.Event) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                self._is_forgotten = False
                self._errors = KeptErrors()
                client = await make_client(self._server, stack, when_forgotten=self._forget, errors=self._errors)
                self._client = await stack.enter_async_context(client)
                if self._server.get("resources") and self._client.server_capabilities.resources is None:
                    raise ValueError("it has no resources: leave out 'resources'.")
                ready.set_result(await self._list_tools(self._client))
                await leave.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError(_describe(error)))
        finally:
            self._client = None

    async def _list_tools(self, client: Client) -> list[mcp_types.Tool]:
        tools = []
        num_pages = 0
        async for page in pages(client.list_tools, MAX_TOOLS + 1):
            tools += page.tools
            num_pages += 1
            if max(len(tools), num_pages) > MAX_TOOLS:
                raise ValueError(f"it lists more than {MAX_TOOLS} tools, or pages of them.")
        return tools

    async def ask(self, send: Callable[[Client], Awaitable[Answer]], *, is_repeatable: bool) -> Answer:
        """Return the answer to the request that `send` makes. Raises ToolError with a message for the model."""
        from mcp import MCPError

        for is_last in (False, True):
            number = self.num_opened
            try:
                if self._client is None:
                    await self._reopen(number)
                assert self._client is not None
                return await send(self._client)
            except asyncio.CancelledError:
                if self._checking is None or self._checking.done():
                    self._checking = asyncio.create_task(self._reopen_if_silent(number))
                raise
            except MCPError as error:
                if not await self._is_lost(error):
                    raise ToolError(error.error.message) from error
            except ConnectionError as error:
                raise ToolError(str(error)) from error
            except ValueError:
                raise
            except Exception:  # of the transport: anyio, httpx
                pass
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

    async def _reopen_if_silent(self, number: int) -> None:
        """Connect again if the server stays silent after a cancelled call."""
        try:
            async with asyncio.timeout(self._connect_timeout):
                if self._client is not None:
                    await self._client.list_tools()
        except TimeoutError:
            logger.warning("MCP server %r no longer answers; its connection is reopened.", self._name)
            with contextlib.suppress(ConnectionError):  # the next call tries again
                await self._reopen(number)
        except Exception:  # the server answers with an error, or is gone, which the next call detects
            return

    async def _reopen(self, number: int) -> None:
        """Connect again, unless another call has done so; cancelling the call does not cancel the connection."""
        if self._reopening is None or self._reopening.done():
            self._reopening = asyncio.create_task(self._connect_again(number))
        await asyncio.shield(self._reopening)

    async def _connect_again(self, number: int) -> None:
        if self.num_opened == number:
            await self._disconnect()
            await self.open()

    async def close(self) -> None:
        """Disconnect. May be called twice."""
        if tasks := [task for task in (self._checking, self._reopening) if task is not None]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        await self._disconnect()

    async def _disconnect(self) -> None:
        task = self._task
        self._task = None
        if task is None:
            return
        self._leave.set()
        done, _ = await asyncio.wait([task], timeout=_CLOSE_SECONDS)
        if not done:
            task.cancel()
            await asyncio.wait([task], timeout=_CLOSE_SECONDS)


async def pages(list_page: Callable[..., Awaitable[Page]], max_pages: int) -> AsyncIterator[Page]:
    """Yield the pages of a list, at most `max_pages`."""
    cursor = None
    for _ in range(max_pages):
        page = await list_page(cursor=cursor)
        yield page
        if not (cursor := page.next_cursor):
            break


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
