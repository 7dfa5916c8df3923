"""`RateLimiter`: how many calls of a tool run at once, and how often one begins."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class RateLimiter:
    """Slots that calls wait for, in the order in which they came; it serves one event loop.

    Args:
        max_concurrent: calls at the same time; None sets no limit.
        rate_per_second: calls that begin in a second, over time; None sets no limit.
        burst: calls that may begin at once after a pause; by default those of a second, one at least.

    Raises:
        ValueError: if a limit is not positive, or the burst below one.

    Example:
        >>> limiter = RateLimiter(rate_per_second=100, burst=1)
        >>> async def three_calls():
        ...     started = asyncio.get_running_loop().time()
        ...     for _ in range(3):
        ...         async with limiter.slot():
        ...             pass
        ...     return asyncio.get_running_loop().time() - started
        >>> asyncio.run(three_calls()) > 0.019
        True
    """

    def __init__(
        self,
        *,
        max_concurrent: int | None = None,
        rate_per_second: float | None = None,
        burst: float | None = None,
    ) -> None:
        for name, value in (("max_concurrent", max_concurrent), ("rate_per_second", rate_per_second)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if burst is not None and burst < 1:
            raise ValueError(f"burst must be at least 1, got {burst}.")
        self._places = None if max_concurrent is None else asyncio.Semaphore(max_concurrent)
        self._interval = 0.0 if rate_per_second is None else 1 / rate_per_second
        self._num_ahead = (max(rate_per_second or 1.0, 1.0) if burst is None else burst) - 1
        self._next = float("-inf")  # when the next call would begin if all came evenly

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a place; it is free again when this is left."""
        now = asyncio.get_running_loop().time()
        # The virtual scheduling of the ATM Forum's generic cell rate algorithm: one number, taken before any waiting.
        due = max(self._next, now)
        self._next = due + self._interval
        await asyncio.sleep(due - self._num_ahead * self._interval - now)
        async with self._places or contextlib.nullcontext():
            yield
