"""A clock of event loops that a test moves on: a limit passes when it is to, and at no other time.

With a limit of a second, what is to be done within it fails where the processor is away for a
second. With a limit of minutes that the test lets pass, nothing depends on the machine, and
nothing waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from unittest import mock

from waiting import wait_until


class MovedClock:
    """The time of the loops that are made from then on; others, such as an engine's, keep theirs."""

    def __init__(self):
        self.seconds = 0.0
        self.loops: set[asyncio.AbstractEventLoop] = set()

    def pass_limit(self, seconds):
        """Let a limit pass as soon as it counts, in seconds: what it limits may begin before, in another loop.

        The limit of an earlier step stays among its loop's timers when the step has ended in time.
        """
        wait_until(lambda: any(seconds / 2 <= left <= seconds for left in self._seconds_left()))
        self.move(seconds)

    def _seconds_left(self):
        timers = [(loop, timer) for loop in list(self.loops) for timer in list(loop._scheduled)]
        return [timer.when() - loop.time() for loop, timer in timers if not timer.cancelled()]

    def move(self, seconds):
        """Let so many seconds have passed; may be called in any thread."""
        self.seconds += seconds
        for loop in list(self.loops):
            with contextlib.suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(bool)  # it looks at its timers


@contextlib.contextmanager
def moved_clock():
    """A clock for the loops that are made within the context."""
    clock = MovedClock()
    make = asyncio.BaseEventLoop.__init__

    def made(loop):
        make(loop)
        clock.loops.add(loop)

    def now(loop):
        return time.monotonic() + (clock.seconds if loop in clock.loops else 0.0)

    with mock.patch.multiple(asyncio.BaseEventLoop, __init__=made, time=now):
        yield clock
