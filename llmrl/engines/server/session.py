"""The HTTP session of a `ServerEngine`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.imports import require

if TYPE_CHECKING:
    import aiohttp


async def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Open a session without a connection limit. Raises MissingExtraError if aiohttp is not installed."""
    aiohttp = require("aiohttp", extra="server")
    return aiohttp.ClientSession(
        headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
    )


def close_session(session: aiohttp.ClientSession, background: BackgroundLoop) -> None:
    """Close a session and its event loop."""
    if not background.is_closed:
        with contextlib.suppress(Exception):
            background.run(session.close(), timeout=10)
        background.close()


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the body of a response. Raises ValueError if it exceeds `max_bytes`, without reading the rest."""
    parts = []
    num_bytes = 0
    async for part in response.content.iter_any():
        parts.append(part)
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise ValueError(f"its answer is longer than {max_bytes} bytes.")
    return b"".join(parts)
