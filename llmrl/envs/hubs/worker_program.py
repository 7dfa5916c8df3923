"""Program of a `WorkerProcess`, which answers its requests in another process and virtual environment.

    python worker_program.py PLAYER.py DESCRIPTOR

llmrl is not installed there, so this file imports only the standard library, and a player also the library that it
plays. A player is a file with a coroutine `open_player(stack, **arguments)`, which returns the answer to the request
`open` and the player's methods by name. Requests and answers are JSON frames on a socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import math
import os
import socket
import struct
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

Fields = dict[str, Any]
"""An object of JSON."""

Methods = dict[str, Callable[..., Awaitable[object]]]

_HEADER = struct.Struct("<I")


def _without_nan(value: object) -> object:
    """Replace numbers that are not finite by their names (JSON has none), which llmrl then reports as invalid."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return value


class Connection:
    """Answers the requests on a socket, each in its own task, so that episodes are played concurrently."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._running: dict[int, asyncio.Task[None]] = {}

    async def read(self) -> Fields | None:
        """Return the next request, or None at the end."""
        try:
            [size] = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def write(self, answer: Fields) -> None:
        """Send an answer."""
        body = json.dumps(_without_nan(answer)).encode()
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def serve(self, methods: Methods) -> None:
        """Answer requests until the other side closes the socket."""
        while (request := await self.read()) is not None:
            number = request["number"]
            if request["method"] == "cancel":
                if (task := self._running.get(number)) is not None:
                    task.cancel()
            else:
                answering = self._answer(number, methods[request["method"]], request["arguments"])
                self._running[number] = asyncio.create_task(answering)

    async def _answer(self, number: int, method: Callable[..., Awaitable[object]], arguments: Fields) -> None:
        try:
            self.write({"number": number, "result": await method(**arguments)})
        except BaseException as error:
            self.write({"number": number, **_failure(error)})
        finally:
            del self._running[number]


def _failure(error: BaseException) -> dict[str, str]:
    return {"error": f"{type(error).__name__}: {error}"[-4000:], "traceback": traceback.format_exc()[-8000:]}


def load_player(path: str) -> Callable[..., Awaitable[tuple[Fields, Methods]]]:
    """Run a player's file and return its `open_player`; the file's folder is not on the module path."""
    spec = importlib.util.spec_from_file_location("llmrl_player", path)
    assert spec is not None and spec.loader is not None  # it is a Python file
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.open_player


async def main(player: str, channel: socket.socket) -> None:
    """Open the player with the arguments of the first request, and serve it."""
    reader, writer = await asyncio.open_connection(sock=channel, limit=1 << 20)
    connection = Connection(reader, writer)
    request = await connection.read()
    if request is None:
        return
    async with contextlib.AsyncExitStack() as stack:
        try:
            opened, methods = await load_player(player)(stack, **request["arguments"])
        except (Exception, SystemExit) as error:
            connection.write({"number": request["number"], **_failure(error)})
            await writer.drain()
            return
        connection.write({"number": request["number"], "result": opened})
        await connection.serve(methods)


if __name__ == "__main__":
    descriptor = int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(sys.argv[1], socket.socket(fileno=descriptor)))
