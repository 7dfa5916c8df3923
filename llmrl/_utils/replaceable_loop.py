"""An event loop for user code that is replaced while its thread is blocked."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
import weakref
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

from llmrl._utils.background_loop import BackgroundLoop, CrossLoopTask
from llmrl._utils.failure import without_packages

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_LOOK_SECONDS = 2.0
_GRACE_SECONDS = 0.5


@dataclass(slots=True, eq=False)
class _Visit:
    """A coroutine in flight, its loop, and whether it may be moved to another loop."""

    errand: CrossLoopTask[Any]
    place: BackgroundLoop
    is_movable: bool


@dataclass(slots=True, eq=False)
class _Watch:
    """The coroutines that one event loop waits for. The loop checks periodically whether their loops respond."""

    visits: set[_Visit] = field(default_factory=set)
    overdue: set[BackgroundLoop] = field(default_factory=set)
    is_looking: bool = False


class ReplaceableLoop:
    """A background loop, started on first use, that is replaced by another loop while its thread is blocked.

    If user code blocks (`time.sleep`, a synchronous request), coroutines that have not started move to another loop,
    and a warning shows the stack of the blocked thread. A loop that responds again is used again.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._loops: list[BackgroundLoop] = []
        self._blocked: set[BackgroundLoop] = set()
        self._watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Watch] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop_all, self._loops)
        self._finalizer.atexit = False

    def __reduce__(self) -> tuple[type[ReplaceableLoop], tuple[str]]:
        return ReplaceableLoop, (self.name,)  # threads cannot be pickled

    @property
    def current(self) -> BackgroundLoop:
        """The loop for new coroutines."""
        with self._lock:
            for loop in list(self._loops):
                if loop.is_closed:
                    self._loops.remove(loop)
                elif loop not in self._blocked or not loop.overdue_seconds:
                    self._blocked.discard(loop)
                    return loop
            self._loops.append(BackgroundLoop(self.name))
            return self._loops[-1]

    def ask(self) -> None:
        """Ask all loops whether they respond, for `blocked_frames`."""
        for loop in list(self._loops):
            loop.ask()

    def blocked_frames(self) -> list[FrameType]:
        """Return the innermost frames of the threads with loops that have not responded to `ask`."""
        threads = [loop.thread for loop in list(self._loops) if loop.overdue_seconds]
        frames = sys._current_frames() if threads else {}
        return [frames[thread.ident] for thread in threads if thread.ident in frames]

    async def wait(
        self,
        coroutine: Coroutine[None, None, Result],
        timeout_seconds: float | None = None,
        *,
        on: BackgroundLoop | None = None,
    ) -> Result:
        """Await a coroutine on `on` or the current loop, up to a timeout. Cancelling the wait cancels the coroutine."""
        here = asyncio.get_running_loop()
        place = on or self.current
        if place.loop is here:
            return await coroutine
        errand = place.begin(coroutine)
        visit = _Visit(errand, place, is_movable=on is None)
        watch = self._watch(here)
        watch.visits.add(visit)
        future = errand.future
        try:
            if timeout_seconds is None:
                return await future
            async with asyncio.timeout(timeout_seconds):
                return await future
        except (asyncio.CancelledError, TimeoutError) as interruption:
            if not future.cancelled():
                if isinstance(interruption, TimeoutError):
                    return future.result()  # the coroutine's own TimeoutError, or a result that arrived at the deadline
                raise
            ended = errand.cancel()
            # Cancellation may itself take time, so a call with a timeout waits longer.
            await asyncio.wait([ended], timeout=_GRACE_SECONDS * (1 if timeout_seconds is None else 2))
            if not ended.done() and visit.place.overdue_seconds:
                self._found_blocked(visit.place)
            if isinstance(interruption, TimeoutError):
                raise TimeoutError(f"it took more than {timeout_seconds:g} s.") from None
            raise
        finally:
            watch.visits.discard(visit)

    def _watch(self, here: asyncio.AbstractEventLoop) -> _Watch:
        watch = self._watches.get(here)
        if watch is None:
            with self._lock:
                watch = self._watches[here] = _Watch()
        if not watch.is_looking:
            watch.is_looking = True
            here.call_later(_LOOK_SECONDS, self._look, watch)
        return watch

    def _look(self, watch: _Watch) -> None:
        watch.is_looking = False
        overdue = {place for place in {visit.place for visit in watch.visits} if place.overdue_seconds > _GRACE_SECONDS}
        for place in overdue & watch.overdue:  # overdue twice, because once may be a pause of the whole process
            self._found_blocked(place)
        for visit in list(watch.visits):
            if visit.is_movable and visit.place in self._blocked and visit.errand.withdraw():
                visit.place = self.current
                visit.errand.go_to(visit.place)
            visit.place.ask()
        watch.overdue = overdue
        if watch.visits:
            self._watch(asyncio.get_running_loop())

    def _found_blocked(self, loop: BackgroundLoop) -> None:
        with self._lock:
            if loop in self._blocked:
                return
            self._blocked.add(loop)
        frame = sys._current_frames().get(loop.thread.ident or 0)
        logger.warning(
            "the thread %r is blocked; new work runs on another thread. A coroutine must not block: await slow work, "
            "or run it in a thread. The thread is blocked in\n%s",
            self.name,
            "" if frame is None else without_packages("".join(traceback.format_stack(frame))),
        )

    def close(self) -> None:
        """Cancel all tasks and end the threads, without waiting for a blocked thread. May be called twice."""
        for loop in self._loops:
            if loop.overdue_seconds > _GRACE_SECONDS:
                loop.stop()
            else:
                loop.close()


def _stop_all(loops: list[BackgroundLoop]) -> None:
    for loop in loops:
        loop.stop()
