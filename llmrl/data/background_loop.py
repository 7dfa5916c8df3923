"""An event loop on its own thread, awaited cheaply from other event loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Mailbox:
    """Runs callables on a loop of another thread; a burst of them costs one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._letters: deque[tuple[Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_awake = False

    def post(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Run `function(*arguments)` on the loop soon.

        Raises:
            RuntimeError: when the loop is closed.
        """
        self._letters.append((function, arguments))
        # Between the append and the flag a drain may run: it then finds the letter. A spurious wake-up is harmless.
        if not self._is_awake:
            self._is_awake = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._is_awake = False
                raise

    def _drain(self) -> None:
        self._is_awake = False
        while self._letters:
            function, arguments = self._letters.popleft()
            function(*arguments)


class BackgroundLoop:
    """An event loop on a daemon thread.

    Example:
        >>> async def answer():
        ...     return 42
        >>> loop = BackgroundLoop("example")
        >>> loop.run(answer())
        42
        >>> loop.close()
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self.loop)
        self._outboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return not self._thread.is_alive()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Run a coroutine on the loop and block until its result.

        Raises:
            RuntimeError: when called on the loop's own thread, which would wait for itself, or after `close`.
        """
        if threading.current_thread() is self._thread or self.is_closed:
            coroutine.close()
            reason = "is closed" if self.is_closed else "cannot block on itself"
            raise RuntimeError(f"The background loop {self._thread.name!r} {reason}.")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    async def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Await a coroutine that runs on the background loop; cancelling the wait cancels it there."""
        here = asyncio.get_running_loop()
        if here is self.loop:
            return await coroutine
        if self.is_closed:
            coroutine.close()
            raise RuntimeError(f"The background loop {self._thread.name!r} is closed.")
        future: asyncio.Future[Result] = here.create_future()
        task_box: list[asyncio.Task[Result]] = []
        outbox = self._outbox(here)

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def finished(task: asyncio.Task[Result]) -> None:
            self._tasks.discard(task)
            cancelled = task.cancelled()
            error = asyncio.CancelledError() if cancelled else task.exception()
            with contextlib.suppress(RuntimeError):  # the awaiting loop is gone, and so is whoever waited
                outbox.post(deliver, None if error is not None else task.result(), error)

        def start() -> None:
            if future.cancelled():
                coroutine.close()
                return
            task = self.loop.create_task(coroutine)
            task_box.append(task)
            self._tasks.add(task)
            task.add_done_callback(finished)

        self._inbox.post(start)
        try:
            return await future
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):
                self._inbox.post(lambda: task_box and task_box[0].cancel())
            raise

    def close(self) -> None:
        """Cancel what still runs, stop the loop and join its thread. May be called twice."""
        with self._lock:
            if self._thread.is_alive() and threading.current_thread() is not self._thread:
                with contextlib.suppress(RuntimeError):
                    self.loop.call_soon_threadsafe(self.loop.stop)
                self._thread.join(timeout=10)

    def _outbox(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        with self._lock:
            outbox = self._outboxes.get(loop)
            if outbox is None:
                for closed in [known for known in self._outboxes if known.is_closed()]:
                    del self._outboxes[closed]
                outbox = self._outboxes[loop] = Mailbox(loop)
            return outbox

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            remaining = asyncio.all_tasks(self.loop)
            for task in remaining:
                task.cancel()
            if remaining:
                self.loop.run_until_complete(asyncio.gather(*remaining, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
