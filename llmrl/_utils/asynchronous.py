"""Running coroutines from synchronous code, and writing to the standard input of programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def run_sync(coroutine: Coroutine[object, None, Result]) -> Result:
    """Run a coroutine and return its result, even if an event loop is running, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


async def write_input(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write to a program's standard input and close it, even if the program does not read it."""
    with contextlib.suppress(ConnectionError):
        stream.write(data)
        await stream.drain()
    stream.close()
    with contextlib.suppress(ConnectionError):
        await stream.wait_closed()
