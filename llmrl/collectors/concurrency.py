"""How many rollouts to hold in flight: as many as pay, found while the engine works.

More rollouts in flight fill the engine's batch, until its memory is full. Then they cost: sequences are put off in the
middle and computed anew, and the contexts of conversations that wait for a tool are forgotten before their next turn.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from llmrl._utils.failure import describe
from llmrl.engines import Completion
from llmrl.engines.load import EngineLoad, take_load

logger = logging.getLogger(__name__)

FIRST_LIMIT = 32
"""Rollouts in flight before anything is known of the engines."""
READER = "concurrency"
"""Of engines' loads."""
_LOOK_SECONDS = 1.0
_FULL = 0.95
_WASTE = 0.3
_SHRINK = 0.85
_GROW = 0.15
_LEAST_TURNS = 8


@dataclass(slots=True)
class TurnCounts:
    """What the turns that ended in a while found of their contexts in the engine's prefix cache."""

    num_turns: int = 0
    num_rollouts: int = 0
    """Those of them that were the first of their rollouts."""
    num_seen_tokens: int = 0
    """Tokens of their prompts that the engine computed for the turn before."""
    num_found_tokens: int = 0
    """Those of them that it still had."""

    def add(self, other: TurnCounts) -> None:
        """Count the turns of another one, too.

        Example:
            >>> counts = TurnCounts(1, 1)
            >>> counts.add(TurnCounts(2, 0, 60, 40)); counts
            TurnCounts(num_turns=3, num_rollouts=1, num_seen_tokens=60, num_found_tokens=40)
        """
        self.num_turns += other.num_turns
        self.num_rollouts += other.num_rollouts
        self.num_seen_tokens += other.num_seen_tokens
        self.num_found_tokens += other.num_found_tokens

    def count(self, completion: Completion, num_seen: int | None) -> None:
        """Count a turn, before which the engine had seen so many tokens of its prompt; None for a rollout's first."""
        self.num_turns += 1
        self.num_rollouts += num_seen is None
        num_cached = completion.metrics.get("num_cached_tokens")
        if num_seen is not None and num_cached is not None:
            self.num_seen_tokens += num_seen
            self.num_found_tokens += min(num_seen, int(num_cached))


class ConcurrencyLimit:
    """Additive increase, multiplicative decrease of the rollouts in flight.

    *Waste* is the share of requests that were put off, and of contexts that were forgotten between turns. Where it
    is more than 0.3 the limit is cut to 0.85 of what is in flight, and nothing is decided until so few are left.
    Some waste pays: a prompt is computed anew far faster than it was sampled, and a larger batch reads the weights as
    seldom as a smaller one. The limit grows while it binds, nothing waits in the engine and its memory has room: by
    one a rollout that begins, so that it doubles while all in flight are replaced once, and after the first cut by
    0.15. Rollouts are counted and not seconds: what a larger limit costs shows only when its rollouts have grown.

    After an update of the weights, which empties the engine's caches, each conversation loses its context once: as many
    turns as rollouts are in flight are not judged.

    After the congestion control of TCP (Jacobson, 1988; Chiu and Jain, 1989).

    Args:
        first: rollouts in flight to begin with.
        least: never fewer.
        most: never more.

    Raises:
        ValueError: if `least` is below 1 or above `most`.

    Example:
        >>> limit = ConcurrencyLimit(8, least=1, most=64)
        >>> limit.observe(EngineLoad(kv_use_max=0.2), TurnCounts(8, 8), num_running=8, version=0)
        16
        >>> limit.observe(EngineLoad(1.0, 3, num_preemptions=9), TurnCounts(16, 16), num_running=16, version=0)
        13
    """

    def __init__(self, first: int, *, least: int = 1, most: int) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"least must be at least 1 and at most most={most}, got {least}.")
        self.least = least
        self.most = most
        self._limit = float(min(max(first, least), most))
        self._is_searching = True
        self._is_draining = False
        self._version: int | None = None
        self._num_to_skip = 0
        self._counts = TurnCounts()
        self._num_preemptions = 0

    @property
    def value(self) -> int:
        """Rollouts that may be in flight."""
        return int(self._limit)

    def observe(self, load: EngineLoad, counts: TurnCounts, *, num_running: int, version: int) -> int:
        """Return the limit after what was seen since the last call."""
        self._is_draining = self._is_draining and num_running > self.value
        if self._is_draining:
            return self.value
        if version != self._version:
            self._num_to_skip = 0 if self._version is None else num_running
            self._version = version
            self._forget()
        self._num_preemptions += load.num_preemptions
        if self._num_to_skip > 0:
            self._num_to_skip -= counts.num_turns
            if self._num_to_skip <= 0:
                self._forget()
        else:
            self._counts.add(counts)
            if self._is_wasteful(num_running):
                self._limit = max(self.least, min(self._limit, num_running) * _SHRINK)
                self._is_searching = False
                self._is_draining = num_running > self.value
                self._forget()
                return self.value
        is_full = load.num_waiting_max > 0 or load.kv_use_max >= _FULL
        if num_running >= self.value and not is_full:
            self._limit = min(self.most, self._limit + counts.num_rollouts * (1.0 if self._is_searching else _GROW))
        return self.value

    def _is_wasteful(self, num_running: int) -> bool:
        """Judge what was counted, as soon as it is enough; then begin to count anew."""
        enough = max(num_running, _LEAST_TURNS)
        counts = self._counts
        put_off = self._num_preemptions / enough
        if put_off > _WASTE:
            return True
        if counts.num_turns < enough:
            return False
        forgotten = 1 - counts.num_found_tokens / counts.num_seen_tokens if counts.num_seen_tokens else 0.0
        self._forget()
        return put_off + forgotten > _WASTE

    def _forget(self) -> None:
        self._counts = TurnCounts()
        self._num_preemptions = 0


@runtime_checkable
class CountsTurns(Protocol):
    """A source of rollouts that says what their turns found."""

    @property
    def engine(self) -> object:
        """What generates."""
        ...

    @property
    def policy_version(self) -> int:
        """The engine's count of weight updates."""
        ...

    def take_turn_counts(self) -> TurnCounts:
        """Return the counts since the last call."""
        ...


class HoldsInFlight(Protocol):
    """A scheduler that can change its number of rollouts in flight."""

    num_running: int
    max_concurrent_rollouts: int

    def notify(self) -> None:
        """Look again."""
        ...


async def follow_load(source: CountsTurns, scheduler: HoldsInFlight, limit: ConcurrencyLimit) -> None:
    """Look at the engine's load every second, and set how many rollouts the scheduler holds in flight.

    Ends, with a warning, when the load cannot be read any more.
    """
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            load = await asyncio.to_thread(take_load, source.engine, READER)
        except Exception as error:
            logger.warning("the engine's load cannot be read; %d rollouts stay: %s", limit.value, describe(error))
            return
        if load is None:  # no engine lives: its requests wait
            continue
        counts = source.take_turn_counts()
        before = limit.value
        version = source.policy_version
        scheduler.max_concurrent_rollouts = limit.observe(
            load, counts, num_running=scheduler.num_running, version=version
        )
        if limit.value > before:
            scheduler.notify()
