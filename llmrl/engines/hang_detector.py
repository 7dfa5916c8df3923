"""Telling an engine that hangs from one that is slow: requests in flight, and not a token for any of them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines.base import Engine, EngineError, ReportsProgress

DEFAULT_HANG_TIMEOUT_SECONDS = 300.0
"""Longer than any prompt takes to be read, or a first batch to be compiled."""

_NUM_LOOKS = 4
"""At an engine that stands still, before it is said to hang."""


@dataclass(slots=True)
class _Observation:
    engine: Engine
    progress: int | None
    num_looks: int = 0
    """How often it was seen like this since."""


class HangDetector:
    """Asks engines how far they are (`async progress()`), time and again, and finds those that stand still.

    `progress()` gives a number that changes with every token, and None while none is due: idle, or paused. An engine
    that does not answer stands still; one without the method, or that died, is not judged. Time is counted by looks: a
    process that was stopped itself, or too busy to look, has not seen that an engine stood still.

    Args:
        timeout_seconds: without a token, after which an engine hangs.

    Raises ValueError if it is not positive.
    """

    def __init__(self, timeout_seconds: float) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"hang_timeout_seconds must be positive, or None to wait for ever; got {timeout_seconds}.")
        self.timeout_seconds = timeout_seconds
        self.interval_seconds = timeout_seconds / _NUM_LOOKS
        """Between two looks."""
        self._sights: dict[int, _Observation] = {}

    def forget(self) -> None:
        """Start anew, after a time without requests."""
        self._sights = {}

    async def find_hanging(self, engines: Sequence[Engine]) -> list[Engine]:
        """Look once, an interval after the last time; the engines that stood still for as long as the time-out."""
        progresses = await asyncio.gather(*map(self._progress, range(len(engines)), engines))
        hanging = []
        for index, (engine, progress) in enumerate(zip(engines, progresses, strict=True)):
            sight = self._sights.get(index)
            if sight is None or progress is None or (sight.engine, sight.progress) != (engine, progress):
                self._sights[index] = _Observation(engine, progress)
                continue
            sight.num_looks += 1
            if sight.num_looks >= _NUM_LOOKS:
                hanging.append(engine)
        return hanging

    async def _progress(self, index: int, engine: Engine) -> int | None:
        if not isinstance(engine, ReportsProgress):
            return None
        try:
            return await asyncio.wait_for(engine.progress(), self.interval_seconds)
        except TimeoutError:
            sight = self._sights.get(index)
            return -1 if sight is None or sight.progress is None else sight.progress
        except EngineError:
            return None


class WatchedEngine(Engine, ReportsProgress, Protocol):
    """An engine that says whether it has requests."""

    @property
    def num_in_flight(self) -> int:
        """Requests that have not returned yet."""
        ...


class HangWatch:
    """Looks at one engine, while it has requests, and ends it when it hangs.

    Args:
        timeout_seconds: without a token, after which it hangs; None to wait for ever.

    Raises ValueError if it is not positive.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._detector = None if timeout_seconds is None else HangDetector(timeout_seconds)
        self._watching: Future[None] | None = None
        self.why = ""
        """Why the engine was ended, and what to do; empty while it was not."""

    def begin(self, engine: WatchedEngine, background: BackgroundLoop) -> None:
        """Look at the engine on that loop, from its first request to its last."""
        if self._detector is not None and (self._watching is None or self._watching.done()):
            self._watching = background.submit(self._look(weakref.ref(engine), self._detector))

    async def _look(self, engine: weakref.ref[WatchedEngine], detector: HangDetector) -> None:
        detector.forget()
        while True:
            await asyncio.sleep(detector.interval_seconds)
            one = engine()
            if one is None or not one.is_alive or not one.num_in_flight:
                return
            if await detector.find_hanging([one]):
                self.why = (
                    f"The {type(one).__name__} gave no token for {detector.timeout_seconds:g} s with requests in "
                    "flight and was ended: it hung, or its process was stopped. Start it again: a run that is started "
                    "again goes on where it was. Where it was only slow, raise hang_timeout_seconds; EngineReplicas "
                    "starts another engine by itself."
                )
                # In a thread: a process that hangs takes its time to end.
                threading.Thread(target=one.shutdown, name="llmrl-end-hanging", daemon=True).start()
                return
            del one
