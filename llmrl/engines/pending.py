"""Requests that wait for a replica which may serve them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from llmrl.engines.base import Engine


@dataclass(slots=True)
class PendingRequest:
    """One request of a caller: the attempt that is under way, and where."""

    attempt_id: str = ""
    engine: Engine | None = None
    is_aborted: bool = False


class Waiters:
    """Coroutines, of any event loops, that wait to be woken together, from any thread."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()

    def add(self) -> asyncio.Future[None]:
        """Return something to await, on the running loop."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.append(future)
        return future

    def wake(self) -> None:
        """Wake all that were added."""
        with self._lock:
            futures = self._futures
            self._futures = []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                future.get_loop().call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
