"""Where tools and judges run: coroutines on a loop of their own, so that what blocks there holds up no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from llmrl.data.background_loop import BackgroundLoop

_UNRESPONSIVE_SECONDS = 0.5


class _Errand:
    __slots__ = ("coroutine", "future", "is_cancelled", "task")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], future: asyncio.Future[Any]) -> None:
        self.coroutine, self.future = coroutine, future
        self.task: asyncio.Task[Any] | None = None
        self.is_cancelled = False


class SlowLane:
    """Runs coroutines on a thread's event loop for another event loop that awaits them.

    All that are handed over in one turn of the awaiting loop cross to the thread together, and those that end at once
    come back together: two wake-ups for any number of them, since a wake-up costs more than an instant tool.

    Example:
        >>> async def tool():
        ...     return 42
        >>> async def main():
        ...     lane = SlowLane()
        ...     try:
        ...         return await asyncio.gather(*(lane.run(tool()) for _ in range(3)))
        ...     finally:
        ...         lane.close()
        >>> asyncio.run(main())
        [42, 42, 42]
    """

    def __init__(self) -> None:
        self._thread: BackgroundLoop | None = None
        self._waiting: list[_Errand] = []

    async def run(self, coroutine: Coroutine[Any, Any, Any], timeout_seconds: float | None = None) -> Any:
        """Await a coroutine that runs on the thread; cancelling the wait cancels it there.

        Raises:
            Exception: whatever the coroutine raised.
            TimeoutError: when it took too long.
        """
        here = asyncio.get_running_loop()
        errand = _Errand(coroutine, here.create_future())
        if not self._waiting:
            here.call_soon(self._send, here)
        self._waiting.append(errand)
        try:
            if timeout_seconds is None:
                return await errand.future
            return await asyncio.wait_for(errand.future, timeout_seconds)
        except TimeoutError:
            self._cancel(errand)
            if not errand.future.cancelled():  # the coroutine's own
                raise
            await self._replace_if_blocked()
            raise TimeoutError(f"a tool or a judge took more than {timeout_seconds} s.") from None
        except asyncio.CancelledError:
            self._cancel(errand)
            raise

    def _send(self, here: asyncio.AbstractEventLoop) -> None:
        errands, self._waiting = self._waiting, []
        if self._thread is None:
            self._thread = BackgroundLoop("llmrl-slow-lane")
        self._thread.loop.call_soon_threadsafe(_start, errands, here)

    def _cancel(self, errand: _Errand) -> None:
        def cancel() -> None:
            errand.is_cancelled = True
            if errand.task is not None:
                errand.task.cancel()

        if self._thread is not None:
            with contextlib.suppress(RuntimeError):
                self._thread.loop.call_soon_threadsafe(cancel)

    async def _replace_if_blocked(self) -> None:
        """A coroutine that blocks its thread would time out all others: leave the thread behind."""
        thread = self._thread
        if thread is None:
            return
        try:
            await asyncio.wait_for(thread.wait(asyncio.sleep(0)), _UNRESPONSIVE_SECONDS)
        except TimeoutError:
            if self._thread is thread:
                self._thread = None
            thread.loop.call_soon_threadsafe(thread.loop.stop)

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._thread is not None:
            self._thread.close()


def _start(errands: list[_Errand], awaiting_loop: asyncio.AbstractEventLoop) -> None:
    """On the thread: start all; what ends in its first step is reported in one go."""
    loop = asyncio.get_running_loop()
    started = []
    for errand in errands:
        if errand.is_cancelled:
            errand.coroutine.close()
            continue
        errand.task = loop.create_task(errand.coroutine)
        started.append(errand)

    def report() -> None:  # runs after the first step of each
        done = [errand for errand in started if errand.task is not None and errand.task.done()]
        if done:
            _report(done, awaiting_loop)
        for errand in started:
            if errand.task is not None and not errand.task.done():
                errand.task.add_done_callback(lambda _, errand=errand: _report([errand], awaiting_loop))  # type: ignore[misc]

    loop.call_soon(report)


def _report(errands: list[_Errand], awaiting_loop: asyncio.AbstractEventLoop) -> None:
    with contextlib.suppress(RuntimeError):  # the awaiting loop is gone, and so is whoever waited
        awaiting_loop.call_soon_threadsafe(_deliver, errands)


def _deliver(errands: list[_Errand]) -> None:
    for errand in errands:
        task, future = errand.task, errand.future
        assert task is not None
        if future.done():
            continue
        if task.cancelled():
            future.cancel()
        elif (error := task.exception()) is not None:
            future.set_exception(error)
        else:
            future.set_result(task.result())
