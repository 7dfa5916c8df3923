"""Detection of engines that hang: they have requests in flight and produce no tokens."""

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
"""Default timeout, longer than the prefill of any prompt or the compilation for a first batch."""

_NUM_LOOKS = 4
"""Number of checks without progress after which an engine counts as hanging."""


@dataclass(slots=True)
class _Observation:
    engine: Engine
    progress: int | None
    num_looks: int = 0
    """Number of later checks with the same progress."""


class HangDetector:
    """Detector of engines that make no progress for `timeout_seconds`.

    An engine that does not answer makes no progress; an engine without `progress()`, and a dead
    engine, is ignored. Time is counted in checks, so a period in which this process was suspended
    does not count. Raises ValueError if `timeout_seconds` is not positive.
    """

    def __init__(self, timeout_seconds: float) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"hang_timeout_seconds must be positive, or None to wait forever; got {timeout_seconds}.")
        self.timeout_seconds = timeout_seconds
        self.interval_seconds = timeout_seconds / _NUM_LOOKS
        """Seconds between two checks."""
        self._sights: dict[int, _Observation] = {}

    def forget(self) -> None:
        """Forget earlier observations, after a time without requests."""
        self._sights = {}

    async def find_hanging(self, engines: Sequence[Engine]) -> list[Engine]:
        """Check all engines and return those that hang; to be called once per `interval_seconds`."""
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
    """An engine that reports its number of requests."""

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""


class HangWatch:
    """Watch that shuts an engine down if it hangs with requests in flight; with a timeout of None, it never does."""

    def __init__(self, timeout_seconds: float | None) -> None:
        self._detector = None if timeout_seconds is None else HangDetector(timeout_seconds)
        self._watching: Future[None] | None = None
        self.why = ""
        """Reason why the engine was shut down; empty if the watch did not shut it down."""

    def begin(self, engine: WatchedEngine, background: BackgroundLoop) -> None:
        """Watch the engine in `background` until it has no more requests."""
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
                    "flight and was shut down: it hung, or its process was suspended. Start it again; a "
                    "training run that is started again resumes. If the engine was only slow, raise "
                    "hang_timeout_seconds; EngineReplicas replaces a hanging engine itself."
                )
                # `shutdown` runs in a thread, because a process that hangs is slow to end.
                threading.Thread(target=one.shutdown, name="llmrl-end-hanging", daemon=True).start()
                return
            del one
