"""`RateLimiter`: limits concurrency and rate of a tool's calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from llmrl._utils.arguments import check_least, check_positive


class RateLimiter:
    """Slots that calls wait for in order of arrival, on one event loop. None means no limit.

    Args:
        max_concurrent: number of concurrent calls.
        rate_per_second: number of calls that start per second.
        burst: number of calls that may start at once after a pause; by default the calls of one second, at least 1.

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
        check_least(1, burst=burst)
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._interval = 0.0 if rate_per_second is None else 1 / rate_per_second
        self._num_ahead = (max(rate_per_second or 1.0, 1.0) if burst is None else burst) - 1
        self._next = float("-inf")  # when the next call would start at an even rate

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot, which is freed on exit."""
        now = asyncio.get_running_loop().time()
        # Virtual scheduling as in the generic cell rate algorithm of the ATM Forum; updated before waiting.
        due = max(self._next, now)
        self._next = due + self._interval
        await asyncio.sleep(due - self._num_ahead * self._interval - now)
        async with self._places or contextlib.nullcontext():
            yield
