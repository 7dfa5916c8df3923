"""Running coroutines from synchronous code, functions that may be async, and input for programs."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from llmrl._utils.background_loop import BackgroundLoop

Result = TypeVar("Result")


def run_sync(coroutine: Coroutine[None, None, Result]) -> Result:
    """Run a coroutine and return its result, even if an event loop is running, as in notebooks.

    An interrupt of this thread cancels the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    background = BackgroundLoop("llmrl-call")
    try:
        return background.run(coroutine)
    finally:
        background.close()


def is_async(function: Callable[..., object]) -> bool:
    """Return whether a function, or an object with `__call__`, is async."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


async def awaited(result: Result | Awaitable[Result]) -> Result:
    """Return the result of a function that may be async."""
    return await result if inspect.isawaitable(result) else result


async def write_input(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a program's standard input and close it, even if the program does not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
    with contextlib.suppress(ConnectionError):
        await stream.wait_closed()
