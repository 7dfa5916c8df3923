"""`RateLimiter`: limits concurrency and rate of a tool's calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from llmrl._utils.arguments import check_positive


class RateLimiter:
    """Slots that calls wait for in order of arrival. None means no limit.

    Args:
        max_concurrent: number of concurrent calls on an event loop.
        rate_per_second: number of calls that start per second.
        burst: calls that may start at once after a pause; by default those of a second, at least 1.

    Raises ValueError if a limit is not positive, or the burst is below 1.
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
    ) -> None:
        check_positive(max_concurrent=max_concurrent, rate_per_second=rate_per_second)
        if burst is not None and not burst >= 1:
            raise ValueError(f"burst must be at least 1, got {burst}.")
        self._max_concurrent = max_concurrent
        # A semaphore belongs to the loop that waited for it, and each `env.step` answers on its own.
        self._places: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._interval = 0.0 if rate_per_second is None else 1 / rate_per_second
        self._num_ahead = (max(rate_per_second or 1.0, 1.0) if burst is None else burst) - 1
        self._next = float("-inf")  # when the next call would start at an even rate

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_places": {}}  # loops cannot be pickled

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, which is freed on exit."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        # The generic cell rate algorithm of the ATM Forum, with virtual scheduling.
        due = max(self._next, now)
        self._next = due + self._interval
        await asyncio.sleep(due - self._num_ahead * self._interval - now)
        if self._max_concurrent is None:
            yield
            return
        for other in list(self._places):
            if other.is_closed():
                self._places.pop(other, None)
        async with self._places.setdefault(loop, asyncio.Semaphore(self._max_concurrent)):
            yield
