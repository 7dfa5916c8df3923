"""`Gateway`: the one way out of a browser, to the allowed domains only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from urllib.parse import urlsplit

REFUSED_HEADER = "x-llmrl-refused"
_MAX_HEAD_BYTES = 64 << 10
_CONNECT_SECONDS = 20.0


def is_allowed(host: str, port: int, allowed_domains: Sequence[str]) -> bool:
    """Whether a host is one of the domains, or below one; a domain with a port allows that port only.

    Example:
        >>> is_allowed("docs.python.org", 443, ["python.org"]), is_allowed("evilpython.org", 443, ["python.org"])
        (True, False)
        >>> is_allowed("127.0.0.1", 8000, ["127.0.0.1:8000"]), is_allowed("127.0.0.1", 22, ["127.0.0.1:8000"])
        (True, False)
    """
    host = host.lower().rstrip(".")
    for domain in allowed_domains:
        name, _, only_port = domain.lower().rpartition(":") if ":" in domain else (domain.lower(), "", "")
        if (host == name or host.endswith(f".{name}")) and (not only_port or int(only_port) == port):
            return True
    return False


class Gateway:
    """A forward proxy on loopback that refuses every host but the allowed ones.

    The browser sends everything through it: pages, what they load, redirects, web sockets. It also resolves names, so
    the browser asks nobody.

    Args:
        allowed_domains: see `is_allowed`.
    """

    def __init__(self, allowed_domains: Sequence[str]) -> None:
        self.allowed_domains = tuple(allowed_domains)
        self.num_refused = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen; the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and cut what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a request that is none, or a host that does not answer: the browser sees a closed connection
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection, so that no second one goes unseen."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, _, fields = head.partition("\r\n")
        method, target, _ = request.split(" ", 2)
        is_tunnel = method == "CONNECT"
        address = urlsplit(f"//{target}" if is_tunnel else target)
        host, port = address.hostname or "", address.port or (443 if is_tunnel else 80)
        if not is_allowed(host, port, self.allowed_domains):
            self.num_refused += 1
            body = f"Refused: {host} is not an allowed domain."
            answer = f"HTTP/1.1 403 Refused\r\n{REFUSED_HEADER}: {host}\r\ncontent-length: {len(body)}\r\n"
            writer.write(f"{answer}content-type: text/plain\r\nconnection: close\r\n\r\n{body}".encode("latin-1"))
            await writer.drain()
            return
        async with asyncio.timeout(_CONNECT_SECONDS):
            far_reader, far_writer = await asyncio.open_connection(host, port)
        try:
            if is_tunnel:
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                path = f"{address.path or '/'}{f'?{address.query}' if address.query else ''}"
                far_writer.write(f"{method} {path} HTTP/1.1\r\n{_closing(fields)}".encode("latin-1"))
            await _join(reader, writer, far_reader, far_writer)
        finally:
            far_writer.close()


def _closing(fields: str) -> str:
    """Header fields such that the server closes after its answer."""
    lines = fields.split("\r\n")
    if any(line.lower().startswith("upgrade:") for line in lines):
        return fields
    kept = [line for line in lines if line and not line.lower().startswith(("connection:", "proxy-", "keep-alive:"))]
    return "\r\n".join([*kept, "connection: close", "", ""])


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Carry bytes both ways until the far side ends."""
    outward = asyncio.create_task(_carry(reader, far_writer))
    try:
        await _carry(far_reader, writer)
    finally:
        outward.cancel()
        await asyncio.gather(outward, return_exceptions=True)


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
