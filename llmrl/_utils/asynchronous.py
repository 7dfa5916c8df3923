"""Running coroutines from synchronous code, and writing to the standard input of programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
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


async def write_input(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a program's standard input and close it, even if the program does not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
    with contextlib.suppress(ConnectionError):
        await stream.wait_closed()
