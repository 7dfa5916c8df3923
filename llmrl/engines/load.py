"""How hard an engine works: its key-value memory, its queue, and what its prefix cache spares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from llmrl.engines.vllm.private import IterationStats, SchedulerStats

METRICS = "metrics"
"""The reader that logs the load; other readers read independently, and each gets every value."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine, or several, had to bear for a while."""

    kv_use_max: float = 0.0
    """Share of the key-value memory that was in use at once, at most, in [0, 1]; of several engines the fullest's."""
    num_waiting_max: int = 0
    """Requests that waited for a place at once, at most; of several engines the longest queue's."""
    num_preemptions: int = 0
    """Requests that were put off in the middle, since the memory was full, and computed anew."""
    num_prompt_tokens: int = 0
    """Tokens of prompts that were looked up in the prefix cache."""
    num_cached_tokens: int = 0
    """Those of them that were found there."""

    def joined(self, other: EngineLoad) -> EngineLoad:
        """Return the load of both, of two times or of two engines.

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
        )

    def to_metrics(self) -> dict[str, float]:
        """Return its metrics by the names of `docs/metrics.md`.

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
        return metrics


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine that can tell how hard it works."""

    def take_load(self, reader: str = METRICS) -> EngineLoad | None:
        """Return the load since this reader's last call; None where it is not known. Blocks, but not for long."""
        ...


def take_load(engine: object, reader: str = METRICS) -> EngineLoad | None:
    """Return the load of an engine, or of several, since this reader's last call; None where none of them tells it.

    Example:
        >>> print(take_load("an engine that tells nothing"))
        None
    """
    if isinstance(engine, ReportsLoad):
        return engine.take_load(reader)
    total: EngineLoad | None = None
    for one in engine if isinstance(engine, Sequence) and not isinstance(engine, str) else ():
        if one.is_alive and (load := take_load(one, reader)) is not None:
            total = load if total is None else total.joined(load)
    return total


class LoadMeter:
    """Adds up what vLLM tells of each of its steps; has the methods of its `StatLoggerBase`."""

    def __init__(self) -> None:
        self._loads = {METRICS: EngineLoad()}

    def take(self, reader: str = METRICS) -> EngineLoad:
        """Return the load since this reader's last call; its first begins to count, except for metrics."""
        load = self._loads.get(reader, EngineLoad())
        self._loads[reader] = EngineLoad()
        return load

    def record(
        self, scheduler_stats: SchedulerStats | None, iteration_stats: IterationStats | None, *_: object, **__: object
    ) -> None:
        """Add a step."""
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
        for reader, load in self._loads.items():
            self._loads[reader] = load.joined(step)

    def log_engine_initialized(self) -> None:
        """Say nothing."""

    def log(self) -> None:
        """Say nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Count nothing."""
