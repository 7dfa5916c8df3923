"""A request to a `ScriptedEngine`: the timing and the versions of its tokens."""

from __future__ import annotations

import asyncio
import math

from llmrl.engines.token_stream import TokenStream


class Flight:
    """A request in flight, which ends after a latency on the clock of the event loop.

    The request's own clock starts with `start` and is stopped between `hold` and `release`. `wait`
    and `start` must be called on the loop; the other methods may be called in any thread.
    """

    __slots__ = (
        "_end",
        "_held_s",
        "_held_since_s",
        "_shown",
        "_start_s",
        "_versions_since",
        "is_aborted",
        "latency_s",
        "loop",
        "num_tokens",
    )

    def __init__(self, latency_s: float, version: int, num_tokens: int) -> None:
        self.latency_s = latency_s
        self.num_tokens = num_tokens
        self.loop = asyncio.get_running_loop()
        self.is_aborted = False
        self._shown: tuple[list[int], TokenStream] | None = None
        self._start_s: float | None = None
        self._held_since_s: float | None = None
        self._held_s = 0.0
        self._versions_since: list[tuple[float, int]] = [(0.0, version)]
        self._end: asyncio.Future[None] = self.loop.create_future()

    def start(self) -> None:
        """Start the clock."""
        self._start_s = self.loop.time()
        self._check()

    async def wait(self) -> None:
        """Wait for the latency or an abort."""
        await self._end

    @property
    def is_started(self) -> bool:
        """Whether the clock has started."""
        return self._start_s is not None

    @property
    def is_done(self) -> bool:
        """Whether the wait is over."""
        return self._end.done()

    @property
    def elapsed_s(self) -> float:
        """Seconds on the request's clock."""
        if self._start_s is None:
            return 0.0
        now_s = self.loop.time() if self._held_since_s is None else max(self._held_since_s, self._start_s)
        return now_s - self._start_s - self._held_s

    def hold(self) -> None:
        """Stop the clock."""
        if self._held_since_s is None:
            self._held_since_s = self.loop.time()

    def release(self) -> None:
        """Let the clock continue."""
        if self._held_since_s is not None:
            if self._start_s is not None:
                self._held_s += self.loop.time() - max(self._held_since_s, self._start_s)
            self._held_since_s = None
            self.loop.call_soon_threadsafe(self._check)

    def abort(self) -> None:
        """End the wait."""
        self.is_aborted = True
        self.loop.call_soon_threadsafe(self._finish)

    def add_version(self, version: int) -> None:
        """Use `version` for the remaining tokens."""
        self._versions_since.append((self.elapsed_s, version))

    def show(self, token_ids: list[int], stream: TokenStream) -> None:
        """Report the tokens to a stream when they are due, and abort once the stream is stopped."""
        self._shown = (token_ids, stream)

    def num_done(self) -> int:
        """Return the number of tokens generated so far, at a constant rate."""
        if self.latency_s <= 0:
            return self.num_tokens
        if math.isinf(self.latency_s):
            return 0
        return min(self.num_tokens, int(self.num_tokens * self.elapsed_s / self.latency_s))

    def versions(self, num_done: int) -> list[int]:
        """Return the version of each token, `[num_done]`."""
        if len(self._versions_since) == 1:
            return [self._versions_since[0][1]] * num_done
        versions = []
        for index in range(num_done):
            due_s = self.latency_s * (index + 1) / self.num_tokens
            versions.append([version for since_s, version in self._versions_since if since_s <= due_s][-1])
        return versions

    def _check(self) -> None:
        # A held or unstarted request needs no timer: `release` and `start` call this again.
        if self._end.done() or self._held_since_s is not None or self._start_s is None:
            return
        remaining_s = self.latency_s - self.elapsed_s
        if self._shown is not None and self.num_done():
            token_ids, stream = self._shown
            stream.report(token_ids[: self.num_done()])
            if stream.is_stopped:
                return self.abort()
        if remaining_s <= 1e-9:  # below the clock's resolution
            self._finish()
        elif not math.isinf(remaining_s):
            if self._shown is not None:
                next_s = self.latency_s * (self.num_done() + 1) / self.num_tokens - self.elapsed_s
                remaining_s = min(remaining_s, next_s + 1e-6)
            self.loop.call_later(remaining_s, self._check)

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)
