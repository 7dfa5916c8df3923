"""`Gateway`: restricts a browser to the allowed domains."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

REFUSED_HEADER = "x-llmrl-refused"
_MAX_HEAD_BYTES = 64 << 10
_CONNECT_SECONDS = 20.0
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Networks of addresses that routers translate or that are local to a site: 6to4, Teredo, local
# NAT64, IPv4-compatible and site-local addresses.
_TUNNELS = tuple(map(ipaddress.ip_network, ("2002::/16", "2001::/32", "64:ff9b:1::/48", "::/96", "fec0::/10")))
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


def is_allowed(host: str, port: int, allowed_domains: Sequence[str]) -> bool:
    """Return whether a host is a domain or its subdomain; a domain with a port allows only that port.

    Example:
        >>> is_allowed("docs.python.org", 443, ["python.org"]), is_allowed("evilpython.org", 443, ["python.org"])
        (True, False)
        >>> is_allowed("127.0.0.1", 8000, ["127.0.0.1:8000"]), is_allowed("127.0.0.1", 22, ["127.0.0.1:8000"])
        (True, False)
    """
    host = host.lower().rstrip(".")
    for domain in allowed_domains:
        name, _, only_port = domain.lower().partition(":")
        name = name.rstrip(".")
        if (host == name or host.endswith(f".{name}")) and (not only_port or int(only_port) == port):
            return True
    return False


def check_domains(allowed_domains: Sequence[str]) -> tuple[str, ...]:
    """Return the domains after checking them.

    Raises:
        TypeError: if `allowed_domains` is a string.
        ValueError: if there is no domain, or if a domain has a scheme, a path or a pattern.

    Example:
        >>> check_domains(["python.org", "127.0.0.1:8000"])
        ('python.org', '127.0.0.1:8000')
        >>> check_domains(["*.python.org"])
        Traceback (most recent call last):
        ...
        ValueError: allowed_domains has '*.python.org', which matches nothing; write 'python.org', which allows ...
    """
    if isinstance(allowed_domains, str):
        raise TypeError(f"allowed_domains must be a list of host names, got {allowed_domains!r}; put it in a list.")
    if not allowed_domains:
        raise ValueError("allowed_domains must be a list of at least one host name, got an empty list.")
    for domain in allowed_domains:
        name, _, port = domain.partition(":")
        if _HOST_NAME.fullmatch(name.rstrip(".")) and (not port or _is_port(port)):
            continue
        host = urlsplit(domain if "//" in domain else f"//{domain}").netloc.lstrip("*.") or "example.org"
        raise ValueError(
            f"allowed_domains has {domain!r}, which matches nothing; write {host!r}, which allows its subdomains, too. "
            "A domain is a host name or an IPv4 address, optionally with a port, without scheme, path or pattern."
        )
    return tuple(allowed_domains)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 1 << 16


def is_reachable(address: str, host: str, allowed_domains: Sequence[str]) -> bool:
    """Return whether the gateway may connect to an address to which a host name resolves.

    Public addresses are allowed; others only if listed themselves, or as `localhost`, because a
    name's owner decides where it resolves to. IPv4 in IPv6 (mapped, NAT64) is unwrapped; tunnels
    (6to4, Teredo) are refused.

    Example:
        >>> is_reachable("93.184.216.34", "example.org", ["example.org"]), is_reachable("10.0.0.1", "a.org", ["a.org"])
        (True, False)
        >>> is_reachable("10.0.0.1", "wiki.corp", ["wiki.corp", "10.0.0.1"])
        True
    """
    parsed = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    if parsed in _NAT64:
        parsed = ipaddress.ip_address(parsed.packed[-4:])
    if parsed.is_global and not parsed.is_multicast and not any(parsed in network for network in _TUNNELS):
        return True
    named = {domain.partition(":")[0].lower().rstrip(".") for domain in allowed_domains}
    return str(parsed) in named or (
        parsed.is_loopback and host.lower().rstrip(".") == "localhost" and "localhost" in named
    )


class Gateway:
    """A forward proxy on loopback that refuses all but the allowed hosts.

    It receives all requests of the browser, also those of web sockets, resolves names itself, and
    connects to the address that it has checked (`is_reachable`).
    """

    def __init__(self, allowed_domains: Sequence[str]) -> None:
        self.allowed_domains = tuple(allowed_domains)
        self.num_refused = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        """Listen, and return the port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_MAX_HEAD_BYTES)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and close all connections."""
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
            pass  # an invalid request or an unreachable host: the browser sees a closed connection
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one request per connection, so that each request is checked."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, _, fields = head.partition("\r\n")
        method, target, _ = request.split(" ", 2)
        is_tunnel = method == "CONNECT"
        address = urlsplit(f"//{target}" if is_tunnel else target)
        host = address.hostname or ""
        port = address.port or (443 if is_tunnel else 80)
        if not is_allowed(host, port, self.allowed_domains):
            await self._refuse(writer, host)
            return
        async with asyncio.timeout(_CONNECT_SECONDS):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = [str(entry[4][0]) for entry in found]
            if not all(is_reachable(address, host, self.allowed_domains) for address in addresses):
                await self._refuse(writer, host)
                return
            far_reader, far_writer = await asyncio.open_connection(addresses[0], port)
        try:
            if is_tunnel:
                writer.write(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                path = f"{address.path or '/'}{f'?{address.query}' if address.query else ''}"
                far_writer.write(f"{method} {path} HTTP/1.1\r\n{_closing(fields)}".encode("latin-1"))
            await _join(reader, writer, far_reader, far_writer)
        finally:
            far_writer.close()

    async def _refuse(self, writer: asyncio.StreamWriter, host: str) -> None:
        self.num_refused += 1
        body = f"Refused: {host} is not an allowed domain."
        answer = f"HTTP/1.1 403 Refused\r\n{REFUSED_HEADER}: {host}\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{answer}content-type: text/plain\r\nconnection: close\r\n\r\n{body}".encode("latin-1"))
        await writer.drain()


def _closing(fields: str) -> str:
    """Return the header fields with `connection: close`, except for an upgrade."""
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
    """Forward bytes in both directions until the far side ends."""
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
