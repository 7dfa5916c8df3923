"""Load of engines: key-value memory, queue, preemptions, prefix cache and drafts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import IterationStats, SchedulerStats

METRICS = "metrics"
"""Name of the reader that logs the load; each reader receives every value."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of one engine or several over a period."""

    kv_use_max: float = 0.0
    """Maximum share of the key-value memory in use, in [0, 1], over time and engines."""
    num_waiting_max: int = 0
    """Maximum length of the queue, over time and engines."""
    num_preemptions: int = 0
    """Number of requests that were preempted for lack of memory, and recomputed."""
    num_prompt_tokens: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    num_drafted_tokens: int = 0
    """Number of tokens that speculation drafted."""
    num_accepted_tokens: int = 0
    """Number of drafted tokens that were sampled."""

    def joined(self, other: EngineLoad) -> EngineLoad:
        """Return the combined load of two periods or two engines.

        Example:
            >>> EngineLoad(0.5, 3, 1).joined(EngineLoad(0.75, 0, 1)) == EngineLoad(0.75, 3, 2)
            True
        """
        return EngineLoad(
            max(self.kv_use_max, other.kv_use_max),
            max(self.num_waiting_max, other.num_waiting_max),
            self.num_preemptions + other.num_preemptions,
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_cached_tokens + other.num_cached_tokens,
            self.num_drafted_tokens + other.num_drafted_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    def to_metrics(self) -> dict[str, float]:
        """Return metrics with the names of `docs/metrics.md`.

        Example:
            >>> EngineLoad(0.5, 3, 1, 100, 40).to_metrics()["engine_cached_share"]
            0.4
        """
        metrics = {
            "engine_kv_use_max": self.kv_use_max,
            "engine_waiting_max": float(self.num_waiting_max),
            "engine_preemptions": float(self.num_preemptions),
        }
        if self.num_prompt_tokens:
            metrics["engine_cached_share"] = self.num_cached_tokens / self.num_prompt_tokens
        if self.num_drafted_tokens:
            metrics["engine_accepted_share"] = self.num_accepted_tokens / self.num_drafted_tokens
        return metrics


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that reports its load."""

    def take_load(self, reader: str = METRICS) -> EngineLoad | None:
        """Return the load since this reader's last call, or None if unknown; blocks briefly."""


def take_load(engine: object, reader: str = METRICS) -> EngineLoad | None:
    """Return the load of one engine or several since this reader's last call, or None if unknown."""
    if isinstance(engine, ReportsLoad):
        return engine.take_load(reader)
    if not isinstance(engine, Sequence) or isinstance(engine, str):
        return None
    total: EngineLoad | None = None
    for one in engine:
        if one.is_alive and (load := take_load(one, reader)) is not None:
            total = load if total is None else total.joined(load)
    return total


class LoadMeter:
    """Accumulator of vLLM's statistics of each step, with the interface of vLLM's `StatLoggerBase`."""

    def __init__(self) -> None:
        self._loads = {METRICS: EngineLoad()}
        self._lock = threading.Lock()  # the engine's loop records, and other threads read

    def take(self, reader: str = METRICS) -> EngineLoad:
        """Return the load since this reader's last call; other readers than `METRICS` start at their first call."""
        with self._lock:
            load = self._loads.get(reader, EngineLoad())
            self._loads[reader] = EngineLoad()
        return load

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *_: object, **__: object
    ) -> None:
        """Add the statistics of one step."""
        if scheduler_stats is None:
            return
        cache = scheduler_stats.prefix_cache_stats
        step = EngineLoad(
            scheduler_stats.kv_cache_usage,
            scheduler_stats.num_waiting_reqs,
            0 if iteration_stats is None else iteration_stats.num_preempted_reqs,
            cache.queries,
            cache.hits,
        )
        if (drafts := scheduler_stats.spec_decoding_stats) is not None:
            step = replace(
                step, num_drafted_tokens=drafts.num_draft_tokens, num_accepted_tokens=drafts.num_accepted_tokens
            )
        with self._lock:
            for reader, load in self._loads.items():
                self._loads[reader] = load.joined(step)

    def log_engine_initialized(self) -> None:
        """Do nothing."""

    def log(self) -> None:
        """Do nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Do nothing."""
