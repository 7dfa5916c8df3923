"""Control of the number of rollouts in flight by the engine's load.

More rollouts in flight fill the engine's batch until its memory is full. Beyond that, sequences are preempted and
recomputed, and the cached contexts of conversations that wait for a tool are evicted before their next turn.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from llmrl._utils.failure import describe
from llmrl.collectors.scheduler import RolloutScheduler
from llmrl.engines import Completion
from llmrl.engines.load import EngineLoad, take_load

logger = logging.getLogger(__name__)

FIRST_LIMIT = 32
"""Number of rollouts in flight before any load was read."""
READER = "concurrency"
"""Name under which this module reads the engines' loads."""
_LOOK_SECONDS = 1.0
_FULL = 0.95
_WASTE = 0.3
_SHRINK = 0.85
_GROW = 0.15
_LEAST_TURNS = 8


@dataclass(slots=True)
class TurnCounts:
    """Prefix cache hits of the turns that ended in a period."""

    num_turns: int = 0
    num_rollouts: int = 0
    """Number of these turns that were the first of their rollouts."""
    num_seen_tokens: int = 0
    """Number of prompt tokens that the engine had computed for the previous turn."""
    num_found_tokens: int = 0
    """Number of those tokens that were still in the cache."""

    def add(self, other: TurnCounts) -> None:
        """Add the counts of `other`."""
        self.num_turns += other.num_turns
        self.num_rollouts += other.num_rollouts
        self.num_seen_tokens += other.num_seen_tokens
        self.num_found_tokens += other.num_found_tokens

    def count(self, completion: Completion, num_seen: int | None) -> None:
        """Count a turn; `num_seen`: prompt tokens that the engine had seen before, None for a rollout's first turn."""
        self.num_turns += 1
        self.num_rollouts += num_seen is None
        num_cached = completion.metrics.get("num_cached_tokens")
        if num_seen is not None and num_cached is not None:
            self.num_seen_tokens += num_seen
            self.num_found_tokens += min(num_seen, int(num_cached))


class ConcurrencyLimit:
    """Limit of the rollouts in flight, by additive increase and multiplicative decrease.

    *Waste* is the share of requests that were preempted plus the share of context tokens evicted between turns. If it
    exceeds 0.3, the limit is cut to 0.85 of the number in flight, and does not change until that number has fallen to
    it. A little waste is tolerated: prefill is much faster than sampling, and a larger batch reads the weights less
    often. The limit grows while it is reached, no request waits and memory is free: by 1 for each rollout that begins,
    and by 0.15 after the first cut. A weight update empties the caches, so as many turns as rollouts are in flight are
    then ignored. Based on the congestion control of TCP (Jacobson, 1988; Chiu and Jain, 1989).

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
        self._growth = 1.0  # for each rollout that begins
        self._is_draining = False
        self._version: int | None = None
        self._num_to_skip = 0
        self._counts = TurnCounts()
        self._num_preemptions = 0

    @property
    def value(self) -> int:
        """Maximum number of rollouts in flight."""
        return int(self._limit)

    def observe(self, load: EngineLoad, counts: TurnCounts, *, num_running: int, version: int) -> int:
        """Return the limit adapted to the load and the counts since the last call."""
        self._is_draining = self._is_draining and num_running > self.value
        if self._is_draining:
            return self.value
        if version != self._version:
            if self._version is not None:
                self._num_to_skip = num_running
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
                self._growth = _GROW
                self._is_draining = num_running > self.value
                self._forget()
                return self.value
        is_full = load.num_waiting_max > 0 or load.kv_use_max >= _FULL
        if num_running >= self.value and not is_full:
            self._limit = min(self.most, self._limit + counts.num_rollouts * self._growth)
        return self.value

    def _is_wasteful(self, num_running: int) -> bool:
        """Return whether waste exceeds its bound; reset the counts once there are enough."""
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
    """Source of rollouts that counts the cache hits of their turns."""

    @property
    def engine(self) -> object:
        """Engine that generates."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates of the engine."""

    def take_turn_counts(self) -> TurnCounts:
        """Return the counts since the last call."""


async def follow_load(source: CountsTurns, scheduler: RolloutScheduler, limit: ConcurrencyLimit) -> None:
    """Adapt the limit to the engine's load every second; end with a warning if this fails."""
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        try:
            load = await asyncio.to_thread(take_load, source.engine, READER)
        except Exception as error:
            logger.warning(
                "the engine's load cannot be read; the limit stays at %d rollouts: %s", limit.value, describe(error)
            )
            return
        if load is None:  # no engine is alive; its requests wait
            continue
        before = limit.value
        scheduler.max_concurrent_rollouts = limit.observe(
            load, source.take_turn_counts(), num_running=scheduler.num_running, version=source.policy_version
        )
        if limit.value > before:
            scheduler.notify()
