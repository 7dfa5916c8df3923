"""Telling an engine that hangs from one that is slow: requests in flight, and not a token for any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from llmrl.engines.base import Engine, EngineError, ReportsProgress

DEFAULT_HANG_TIMEOUT_SECONDS = 300.0
"""Longer than any prompt takes to be read, or a first batch to be compiled."""

_NUM_LOOKS = 4
"""At an engine that stands still, before it is said to hang."""


@dataclass(slots=True)
class _Sight:
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

    Raises:
        ValueError: when it is not positive.
    """

    def __init__(self, timeout_seconds: float) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"hang_timeout_seconds must be positive, or None to wait for ever; got {timeout_seconds}.")
        self.timeout_seconds = timeout_seconds
        self.interval_seconds = timeout_seconds / _NUM_LOOKS
        """Between two looks."""
        self._sights: dict[int, _Sight] = {}

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
                self._sights[index] = _Sight(engine, progress)
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
