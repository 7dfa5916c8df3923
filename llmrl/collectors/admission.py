"""Admission on demand: how many groups to start so that the next batch comes out exactly full."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

from llmrl.collectors.groups import DropReason

Surplus = Literal["carry", "keep", "refuse"]


@dataclass(slots=True, kw_only=True)
class Selection:
    """What leaves a gate for one batch."""

    group_ids: list[str] = field(default_factory=list)
    """Delivered, in the order in which they were admitted."""
    staleness: dict[str, int] = field(default_factory=dict)
    """Versions between a delivered group's start and now."""


class Gate(Protocol):
    """Says how many groups may be started, and which of those that are ready make the next batch."""

    follows_versions: bool
    """Whether a new policy version alone may change the answers."""
    rest_reason: str | None
    """Why groups that are not in a full batch are dropped with it; None where they wait for the next."""

    @property
    def live_ids(self) -> list[str]:
        """Groups that are being played or ready, in order of admission."""
        ...

    def request_batch(self) -> None:
        """Note that the consumer waits for its next batch."""
        ...

    def run_unasked(self) -> None:
        """Give batches as they come from now on, whether or not they are trained on: a buffer is filled."""
        ...

    def num_admissible(self, version: int) -> float:
        """Return how many groups may be admitted now."""
        ...

    def admit(self, group_id: str, version: int) -> None:
        """Note that a group was started."""
        ...

    def discard(self, group_id: str) -> None:
        """Note that a group was dropped; its place is free again."""
        ...

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Note that a group has settled with so many units."""
        ...

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch, or None while there is not enough; with `is_last` whatever there is."""
        ...

    def rollback(self) -> None:
        """Take back the batch that was selected last: it brought nothing, and another one takes its place."""
        ...

    def carry(self, units: int) -> None:
        """Count units that are there already, left over by the batches of an earlier run."""
        ...

    def overdue_ids(self, version: int) -> list[str]:
        """Return the groups, ready or not, that are too old to be delivered."""
        ...


class DemandGate:
    """Starts only what a batch that was asked for still lacks, counting what is ready and what is being played.

    What a group holds is counted in units: 1 for a group, its turns, or its tokens. Where a group that was admitted
    brings nothing (`discard`), exactly one more is admitted: refilled.

    Args:
        units_per_batch: size of a batch.
        surplus: what becomes of units beyond a batch: they are counted to the next (`carry`), they make this one larger
            (`keep`), or their group waits for the next (`refuse`).
        estimate_units: expect the mean of the groups so far, since the units of one are known only when it is ready.
        num_extra: groups started beyond the need, so that the slowest need not be waited for.
        num_ahead: groups kept in hand, being played or ready, whether or not a batch was asked for.
        reset_each_batch: drop groups that are not in a full batch with it, so that each begins afresh.

    Raises:
        ValueError: for a batch of less than one unit.

    Example:
        >>> gate = DemandGate(2)
        >>> gate.num_admissible(0)
        0
        >>> gate.request_batch()
        >>> gate.num_admissible(0)
        2
    """

    def __init__(
        self,
        units_per_batch: int,
        *,
        surplus: Surplus = "refuse",
        estimate_units: bool = False,
        num_extra: int = 0,
        num_ahead: int = 0,
        reset_each_batch: bool = False,
    ) -> None:
        if units_per_batch < 1:
            raise ValueError(f"units_per_batch must be at least 1, got {units_per_batch}.")
        self.units_per_batch = units_per_batch
        self.follows_versions = False
        self.rest_reason = DropReason.OVERSAMPLED if num_extra else DropReason.RESET if reset_each_batch else None
        self._num_extra = num_extra
        self._num_ahead = num_ahead
        self._reset_each_batch = reset_each_batch
        self._surplus = surplus
        self._estimate_units = estimate_units
        self._is_free_running = False
        self._is_asked = False
        self._admitted: dict[str, int] = {}  # id: version at admission, in order; being played or ready
        self._ready: dict[str, int] = {}  # id: units
        self._ready_units = 0
        self._credit = 0  # units of divided groups that wait for the next batch
        self._num_seen = 0
        self._num_units_seen = 0

    @property
    def live_ids(self) -> list[str]:
        """Groups that are being played or ready, in order of admission."""
        return list(self._admitted)

    def request_batch(self) -> None:
        """Note that the consumer waits for its next batch."""
        self._is_asked = True

    def run_unasked(self) -> None:
        """Start groups without demand, as many as there is room for, until a whole batch lies ready.

        Where each batch begins afresh, nothing is started ahead of it.
        """
        self._is_free_running = not self._reset_each_batch

    def num_admissible(self, version: int) -> float:
        """Return how many groups may be admitted now."""
        if self._is_free_running and self._credit + self._ready_units < self.units_per_batch:
            return math.inf
        num_open = len(self._admitted) - len(self._ready)
        return max(0, self._num_needed() - num_open, self._num_ahead - len(self._admitted))

    def _num_needed(self) -> int:
        lacking = self.units_per_batch - self._credit - self._ready_units
        if not self._is_asked or lacking <= 0:
            return 0
        if not self._estimate_units:
            return lacking + self._num_extra
        if not self._num_seen:  # nothing to estimate by: wait for a first one
            return 1
        return math.ceil(lacking * self._num_seen / max(1, self._num_units_seen))

    def admit(self, group_id: str, version: int) -> None:
        """Note that a group was started."""
        self._admitted[group_id] = version

    def discard(self, group_id: str) -> None:
        """Note that a group was dropped; its place is free again."""
        self._admitted.pop(group_id, None)
        self._ready_units -= self._ready.pop(group_id, 0)

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Note that a group has settled with so many units."""
        self._ready[group_id] = units
        self._ready_units += units
        self._num_seen += 1
        self._num_units_seen += units

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch, or None while there is not enough; with `is_last` whatever there is."""
        have = self._credit + self._ready_units
        if have < self.units_per_batch and not (is_last and have):
            return None
        selected = Selection()
        units = self._credit
        for group_id in [group_id for group_id in self._admitted if group_id in self._ready]:
            size = self._ready[group_id]
            is_full = units >= self.units_per_batch
            is_too_much = self._surplus == "refuse" and selected.group_ids and units + size > self.units_per_batch
            if is_full or is_too_much:
                break
            units += size
            selected.group_ids.append(group_id)
            selected.staleness[group_id] = version - self._admitted[group_id]
            self.discard(group_id)
        self._credit = max(0, units - self.units_per_batch) if self._surplus == "carry" else 0
        self._is_asked = False
        return selected

    def rollback(self) -> None:
        """Return the batch that was selected last brought nothing; another one will be asked for."""

    def carry(self, units: int) -> None:
        """Count units that are there already, left over by the batches of an earlier run."""
        self._credit = units

    def overdue_ids(self, version: int) -> list[str]:
        """Return groups that can no longer be delivered: none, for demand has no bound on age."""
        return []
