"""Awaitable calls of blocking user functions, in daemon threads, which do not delay the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Generic, ParamSpec, TypeVar

from llmrl._utils.failure import as_exception

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WorkerThread:
    """A thread that runs calls in order. It starts with the first call, and ends with `close` or with its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_left: threading.Event | None = None
        self._end = weakref.finalize(self, self._calls.put, None)

    def _begin(self) -> None:
        self._is_left = threading.Event()
        arguments = (self._calls, self._is_left)
        threading.Thread(target=_work, args=arguments, name=self._name, daemon=True).start()

    def leave_behind(self) -> None:
        """Run later calls in a new thread, because the current call cannot be interrupted."""
        if self._is_left is not None:
            self._is_left.set()
        self._begin()

    async def call(
        self,
        function: Callable[Parameters, Result],
        /,
        *arguments: Parameters.args,
        **keywords: Parameters.kwargs,
    ) -> Result:
        """Call a function in the thread and return its result. Errors are converted by `as_exception`.

        Raises RuntimeError after `close`.
        """
        if not self._end.alive:
            raise RuntimeError(f"The thread {self._name!r} is closed: its owner was shut down.")
        if self._is_left is None:
            self._begin()
        call = _Call(lambda: function(*arguments, **keywords))
        self._calls.put(call.run)
        return await call.future

    def close(self) -> None:
        """End the thread after the calls that are already queued. May be called twice."""
        self._end()


async def run_in_thread(
    function: Callable[Parameters, Result], /, *arguments: Parameters.args, **keywords: Parameters.kwargs
) -> Result:
    """Run a function in a new thread, which a cancellation abandons. Errors are converted by `as_exception`."""
    call = _Call(lambda: function(*arguments, **keywords))
    threading.Thread(target=call.run, name="llmrl-call", daemon=True).start()
    return await call.future


def start_in_thread(
    function: Callable[Parameters, Result], /, *arguments: Parameters.args, **keywords: Parameters.kwargs
) -> Future[Result]:
    """Run a function in a new daemon thread. Unlike an executor's thread, it does not delay the end of the process."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments, **keywords))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="llmrl-call", daemon=True).start()
    return future


class _Call(Generic[Result]):
    __slots__ = ("_function", "_loop", "future")

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Result] = self._loop.create_future()

    def run(self) -> None:
        if self.future.cancelled():
            return
        settle: Callable[[], None]
        try:
            settle = partial(self.future.set_result, self._function())
        except BaseException as error:
            settle = partial(self.future.set_exception, as_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._settle, settle)

    def _settle(self, settle: Callable[[], None]) -> None:
        if not self.future.done():
            settle()


def _work(calls: queue.SimpleQueue[Callable[[], None] | None], is_left: threading.Event) -> None:
    while not is_left.is_set():
        call = calls.get()
        if call is None or is_left.is_set():
            calls.put(call)  # for the thread that has replaced this one, or that this one has replaced
            return
        call()
        del call  # release its arguments while waiting
