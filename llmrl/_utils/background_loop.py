"""An event loop in its own thread, with cheap waits from other event loops."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Generic, TypeVar

from llmrl._utils.failure import as_exception, describe, guarded

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Mailbox:
    """A queue of calls for a loop in another thread; a burst of calls wakes the loop once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._woken_s: float | None = None

    @property
    def overdue_seconds(self) -> float:
        """Seconds since the loop was woken without processing its queue; 0 if no call waits."""
        woken_s = self._woken_s
        return 0.0 if woken_s is None else time.monotonic() - woken_s

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Schedule `function(*arguments)` on the loop. Raises RuntimeError if the loop is closed."""
        self._queue.append((function, arguments))
        # If `_drain` runs between these statements, it finds the call. A superfluous wake-up is harmless.
        if self._woken_s is None:
            self._woken_s = time.monotonic()
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                self._woken_s = None
                raise

    def _drain(self) -> None:
        self._woken_s = None
        try:
            while self._queue:
                function, arguments = self._queue.popleft()
                function(*arguments)
        finally:
            if self._queue:  # the function has raised an exception, which the loop reports
                self._loop.call_soon(self._drain)


_mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
_mailboxes_lock = threading.Lock()


def mailbox_of(loop: asyncio.AbstractEventLoop) -> Mailbox:
    """Return the queue that all other threads use to call a loop."""
    with _mailboxes_lock:
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            for closed in [known for known in _mailboxes if known.is_closed()]:
                del _mailboxes[closed]
            mailbox = _mailboxes[loop] = Mailbox(loop)
        return mailbox


class CrossLoopTask(Generic[Result]):
    """A coroutine that runs on a background loop, and its result for the loop that waits."""

    __slots__ = ("_background", "_claims", "_context", "_coroutine", "_ended", "_here", "_outbox", "_task", "future")

    def __init__(self, coroutine: Coroutine[None, None, Result]) -> None:
        self._coroutine = coroutine
        self._here = asyncio.get_running_loop()
        self._context = contextvars.copy_context()  # the sender's context, not that of the task that wakes the loop
        self.future: asyncio.Future[Result] = self._here.create_future()
        """The result, on the loop that started the coroutine."""
        self._task: asyncio.Task[Result] | None = None
        self._ended: asyncio.Future[None] | None = None

    def go_to(self, background: BackgroundLoop) -> None:
        """Start the coroutine on this loop. If the loop is closed, close the coroutine and raise RuntimeError."""
        self._background = background
        self._claims = [None]  # the thread that takes the item may start or close the coroutine
        try:
            background.check_open()
            self._outbox = mailbox_of(self._here)
            background.post(self._start, background, self._claims)
        except RuntimeError:
            self._coroutine.close()
            raise

    def withdraw(self) -> bool:
        """Withdraw the coroutine if it has not started; return whether it was withdrawn."""
        return _take(self._claims)

    def cancel(self) -> asyncio.Future[None]:
        """Cancel the coroutine, and return a future that is done when it has ended."""
        self.future.cancel()
        self._ended = self._here.create_future()
        if self.withdraw():
            self._coroutine.close()
            self._ended.set_result(None)
        elif self._task is not None and self._task.done():
            self._ended.set_result(None)
        with contextlib.suppress(RuntimeError):
            self._background.post(lambda: self._task is not None and self._task.cancel())
        return self._ended

    def _start(self, background: BackgroundLoop, tickets: list[None]) -> None:
        if _take(tickets):
            self._task = background.loop.create_task(guarded(self._coroutine), context=self._context)
            self._task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Result]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if isinstance(error, asyncio.CancelledError) and not self._background.is_closed:
            error = as_exception(error)  # the coroutine raised it: a cancelled wait ignores the result
        with contextlib.suppress(RuntimeError):  # the awaiting loop is closed
            self._outbox.post(self._deliver, error)

    def _deliver(self, error: BaseException | None) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)
        if self.future.done():  # cancelled
            return
        if error is not None:
            self.future.set_exception(error)
        elif self._task is not None:
            self.future.set_result(self._task.result())


def _take(tickets: list[None]) -> bool:
    try:
        tickets.pop()  # only one of two threads succeeds
    except IndexError:
        return False
    return True


class BackgroundLoop:
    """An event loop in a daemon thread. It runs until `close`, even if a task raises `SystemExit`."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._inbox = Mailbox(self.loop)
        self._is_closing = False
        self._is_ending = False
        self.thread = threading.Thread(target=self._run_forever, name=name, daemon=True)
        """The thread of the loop."""
        self.thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether the loop was closed."""
        return self._is_closing or not self.thread.is_alive()

    @property
    def overdue_seconds(self) -> float:
        """Seconds for which a call has waited; more than a moment means that the loop's thread is blocked."""
        return self._inbox.overdue_seconds

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a thread cannot be pickled

    def submit(self, coroutine: Coroutine[None, None, Result]) -> Future[Result]:
        """Run a coroutine on the loop, and return its future for a thread. Raises RuntimeError after `close`."""
        try:
            self.check_open()
            return asyncio.run_coroutine_threadsafe(guarded(coroutine), self.loop)
        except RuntimeError:
            coroutine.close()
            raise

    def run(self, coroutine: Coroutine[None, None, Result], timeout: float | None = None) -> Result:
        """Run a coroutine on the loop and return its result. Raises RuntimeError in that thread or after `close`."""
        if threading.current_thread() is self.thread:
            coroutine.close()
            raise RuntimeError(f"The background loop {self.thread.name!r} cannot block on itself; use await instead.")
        return self.submit(coroutine).result(timeout)

    def check_open(self) -> None:
        """Raise RuntimeError if the loop is closed."""
        if self.is_closed:
            raise RuntimeError(f"The background loop {self.thread.name!r} is closed: its owner was shut down.")

    def begin(self, coroutine: Coroutine[None, None, Result]) -> CrossLoopTask[Result]:
        """Start a coroutine on the loop for the caller's running loop. Raises RuntimeError after `close`."""
        errand = CrossLoopTask(coroutine)
        errand.go_to(self)
        return errand

    async def wait(self, coroutine: Coroutine[None, None, Result]) -> Result:
        """Await a coroutine that runs on the background loop. Cancelling the wait cancels the coroutine.

        Raises:
            Exception: any exception of the coroutine, converted by `as_exception`.
            CancelledError: if the wait is cancelled, or the loop is closed.
            RuntimeError: after `close`.
        """
        if asyncio.get_running_loop() is self.loop:
            return await coroutine
        errand = self.begin(coroutine)
        try:
            return await errand.future
        except asyncio.CancelledError:
            errand.cancel()
            raise

    def post(self, function: Callable[..., object], *arguments: object) -> None:
        """Schedule a function on the loop. Raises RuntimeError after `close`."""
        self.check_open()
        self._inbox.post(function, *arguments)

    def ask(self) -> None:
        """Schedule an empty call, so that `overdue_seconds` shows whether the loop responds."""
        with contextlib.suppress(RuntimeError):
            self.post(bool)

    def close(self) -> None:
        """Cancel all tasks, stop the loop and join its thread. May be called twice."""
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.stop()
            self.thread.join(timeout=10)

    def call_outside(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function that waits for this loop; on the loop's own thread, call it in a new thread.

        For the finalizer of the loop's owner, which garbage collection runs on any thread.
        """
        if threading.current_thread() is self.thread:
            threading.Thread(target=function, args=arguments, name=f"{self.thread.name}-end", daemon=True).start()
        else:
            function(*arguments)

    def abandon(self) -> None:
        """Close the loop of an owner that was garbage-collected. In the loop's own thread this does not wait."""
        self.stop()
        self.close()

    def stop(self) -> None:
        """Stop the loop without waiting. May be called twice."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._is_ending:  # a second stop would interrupt the end of the tasks
            self._is_ending = True
            self.loop.stop()

    def _run_forever(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            while not self._is_ending:
                self._returns(self.loop.run_forever)
            if remaining := asyncio.all_tasks(self.loop):
                for task in remaining:
                    task.cancel()
                ended = asyncio.gather(*remaining, return_exceptions=True)
                while not self._returns(lambda: self.loop.run_until_complete(ended)):
                    pass
            self._returns(lambda: self.loop.run_until_complete(self.loop.shutdown_asyncgens()))
        finally:
            self.loop.close()

    def _returns(self, run: Callable[[], object]) -> bool:
        """Run the loop; return False if a task raised `SystemExit` or `KeyboardInterrupt`, which stopped it."""
        try:
            run()
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("%s was raised on the thread %r, which continues", describe(error), self.thread.name)
            return False
        return True
