"""Requests that wait for a replica."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass

from llmrl.engines.base import Engine


@dataclass(slots=True)
class PendingRequest:
    """A request with its current attempt and engine."""

    attempt_id: str = ""
    engine: Engine | None = None
    is_aborted: bool = False


class Waiters:
    """Coroutines on any event loops that can be woken together from any thread."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []
        self._lock = threading.Lock()

    def add(self) -> asyncio.Future[None]:
        """Return a future of the running loop that `wake` completes."""
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            self._futures.append(future)
        return future

    def wake(self) -> None:
        """Wake all added waiters."""
        with self._lock:
            futures = self._futures
            self._futures = []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # the future's loop is closed
                future.get_loop().call_soon_threadsafe(_set, future)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
