"""Gates, which decide how many groups may start and which ready groups form the next batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from llmrl._utils.arguments import check_least
from llmrl.collectors.groups import DropReason

Surplus = Literal["carry", "keep", "refuse"]
LatePolicy = Literal["wait", "drop"]


@dataclass(slots=True, kw_only=True)
class Selection:
    """Groups that a gate selects for one batch."""

    staleness: dict[str, int]
    """Number of versions between each group's start and now, by id, in order of admission."""

    @property
    def group_ids(self) -> list[str]:
        """Ids of the groups in order of admission."""
        return list(self.staleness)


class Gate(Protocol):
    """Decides how many groups may be started, and which ready groups form the next batch."""

    follows_versions: bool = False
    """Whether a new policy version alone may change the answers."""
    rest_reason: str | None = None
    """Drop reason of the groups left by a full batch; None if they wait for the next batch."""
    _admitted: Mapping[str, object]
    """Groups that are being played or ready, by id, in order of admission."""

    @property
    def live_ids(self) -> list[str]:
        """Ids of the groups that are being played or ready, in order of admission."""
        return list(self._admitted)

    def request_batch(self) -> None:
        """Record that the consumer waits for its next batch."""

    def run_unasked(self) -> None:
        """Select batches without requests from now on, to fill a buffer."""

    def num_admissible(self, version: int) -> float:
        """Return the number of groups that may be admitted now."""

    def admit(self, group_id: str, version: int) -> None:
        """Record that a group was started."""

    def discard(self, group_id: str) -> None:
        """Record that a group was dropped, which frees its place."""

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Record that a group has settled with `units` units."""

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch, or None if too little is ready; with `is_last`, what is ready."""

    def rollback(self) -> None:
        """Undo the last selection: the batch was empty, and another takes its place."""

    def carry(self, units: int) -> None:
        """Count units left over from earlier batches."""

    def overdue_ids(self, version: int) -> list[str]:
        """Return the groups, ready or not, that are too old to be delivered; by default none."""
        return []


class DemandGate(Gate):
    """Gate that admits only the groups that the requested batch still needs.

    Sizes are counted in units: 1 per group, its turns, or its tokens. For each discarded group one more is admitted.

    Args:
        units_per_batch: size of a batch, at least 1.
        surplus: use of units beyond a batch: count them for the next batch (`carry`), add them to
            this batch (`keep`), or leave their group for the next batch (`refuse`).
        estimate_units: whether to expect the mean size of previous groups, if a group's size is not known in advance.
        num_extra: number of groups started beyond the need, so that the batch does not wait for the slowest.
        num_ahead: number of groups kept in play or ready, even if no batch was requested.
        reset_each_batch: whether a full batch drops the groups that are not in it.

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
        check_least(1, units_per_batch=units_per_batch)
        self.units_per_batch = units_per_batch
        if num_extra:
            self.rest_reason = DropReason.OVERSAMPLED
        elif reset_each_batch:
            self.rest_reason = DropReason.RESET
        self._num_extra = num_extra
        self._num_ahead = num_ahead
        self._reset_each_batch = reset_each_batch
        self._surplus = surplus
        self._estimate_units = estimate_units
        self._is_free_running = False
        self._is_asked = False
        self._admitted: dict[str, int] = {}  # id: version at admission, in order; being played or ready
        self.ready: dict[str, int] = {}  # id: units
        self.ready_units = 0
        self.credit = 0  # units of split groups that wait for the next batch
        self._num_seen = 0
        self._num_units_seen = 0

    def request_batch(self) -> None:
        """Record that the consumer waits for its next batch."""
        self._is_asked = True

    def run_unasked(self) -> None:
        """Admit groups until a whole batch is ready; ignored with `reset_each_batch`."""
        self._is_free_running = not self._reset_each_batch

    def num_admissible(self, version: int) -> float:
        """Return the number of groups that may be admitted now."""
        if self._is_free_running and self.credit + self.ready_units < self.units_per_batch:
            return math.inf
        num_open = len(self._admitted) - len(self.ready)
        return max(0, self._num_needed() - num_open, self._num_ahead - len(self._admitted))

    def _num_needed(self) -> int:
        lacking = self.units_per_batch - self.credit - self.ready_units
        if not self._is_asked or lacking <= 0:
            return 0
        if not self._estimate_units:
            return lacking + self._num_extra
        if not self._num_seen:  # nothing to estimate from: admit one group
            return 1
        return math.ceil(lacking * self._num_seen / max(1, self._num_units_seen))

    def admit(self, group_id: str, version: int) -> None:
        """Record that a group was started."""
        self._admitted[group_id] = version

    def discard(self, group_id: str) -> None:
        """Record that a group was dropped, which frees its place."""
        self._admitted.pop(group_id, None)
        self.ready_units -= self.ready.pop(group_id, 0)

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Record that a group has settled with `units` units."""
        self.ready[group_id] = units
        self.ready_units += units
        self._num_seen += 1
        self._num_units_seen += units

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch, or None if too little is ready; with `is_last`, what is ready."""
        have = self.credit + self.ready_units
        if have < self.units_per_batch and not (is_last and have):
            return None
        staleness: dict[str, int] = {}
        units = self.credit
        for group_id in [group_id for group_id in self._admitted if group_id in self.ready]:
            size = self.ready[group_id]
            is_full = units >= self.units_per_batch
            exceeds = units + size > self.units_per_batch
            if is_full or (exceeds and staleness and self._surplus == "refuse"):
                break
            units += size
            staleness[group_id] = version - self._admitted[group_id]
            self.discard(group_id)
        self.credit = 0
        if self._surplus == "carry":
            self.credit = max(0, units - self.units_per_batch)
        self._is_asked = False
        return Selection(staleness=staleness)

    def rollback(self) -> None:
        """Do nothing: the next request admits the groups of another batch."""

    def carry(self, units: int) -> None:
        """Count units left over from earlier batches."""
        self.credit = units


class StalenessGate(Gate):
    """Gate that lets collection run at most `max_staleness` versions ahead of training; 0 is on-policy.

    Batch `b` (from 0) is trained on at version `b`, with one update per batch. A group that starts at version `v` has
    the deadline `v + max_staleness`, the last batch that may contain it. Two rules keep the bound:

    - *admission_is_bounded*: at version `v` at most `(v + max_staleness + 1) * groups_per_batch` groups have been
      admitted that were or will be delivered, so each has a place before its deadline;
    - *deadlines_stay_feasible* (`late="wait"`): a batch takes the oldest ready groups, and only if the remaining
      groups can still meet their deadlines: the `i`-th of them, in order of deadlines, is in batch
      `b + 1 + i // groups_per_batch` or earlier. Otherwise the batch waits for the slow groups.

    With `late="drop"` nothing waits: groups past their deadline are dropped and replaced. In both cases, a group that
    started more than `max_staleness` actual versions ago is never delivered. The trainer has
    progressed if there is a new version, or if it requests the next batch without one.

    Example:
        >>> gate = StalenessGate(2, max_staleness=0)
        >>> gate.num_admissible(0)
        2
        >>> gate.admit("a", 0); gate.admit("b", 0); gate.num_admissible(0)
        0
        >>> gate.mark_ready("a"); gate.mark_ready("b"); gate.select(0).group_ids
        ['a', 'b']
        >>> gate.num_admissible(0), gate.num_admissible(1)
        (0, 2)
    """

    follows_versions = True

    def __init__(self, groups_per_batch: int, *, max_staleness: int, late: LatePolicy = "wait") -> None:
        check_least(1, groups_per_batch=groups_per_batch)
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 (on-policy), got {max_staleness}.")
        if late not in ("wait", "drop"):
            raise ValueError(f"late must be 'wait' or 'drop', got {late!r}.")
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.late = late
        self._is_unasked = False
        self._num_batches = 0
        self._progress = 0  # index of the batch that the trainer needs next, as far as known
        self._version: int | None = None
        self._admitted: dict[str, tuple[int, int]] = {}  # id: (deadline, true version at admission), in order
        self._num_ready = 0
        self._ready_by_deadline: dict[int, dict[str, None]] = {}
        self._num_by_deadline: dict[int, int] = {}

    def request_batch(self) -> None:
        """Record that the consumer has finished the batches so far and waits for the next."""
        if not self._is_unasked:
            self._progress = max(self._progress, self._num_batches)

    def run_unasked(self) -> None:
        """Measure progress by versions only: a buffer requests batches ahead of training."""
        self._is_unasked = True

    def _observe(self, version: int) -> None:
        if self._version is None:
            self._version = version
        if version > self._version:
            self._progress += version - self._version
            self._version = version
            if not self._is_unasked:  # several updates per batch do not allow running further ahead
                self._progress = min(self._progress, self._num_batches)

    def num_admissible(self, version: int) -> int:
        """Return the number of groups that may be admitted now (*admission_is_bounded*)."""
        self._observe(version)
        allowed = (self._progress + self.max_staleness + 1) * self.groups_per_batch
        return max(0, allowed - self._num_batches * self.groups_per_batch - len(self._admitted))

    def admit(self, group_id: str, version: int) -> None:
        """Record that a group was started."""
        self._observe(version)
        deadline = self._progress + self.max_staleness
        self._admitted[group_id] = (deadline, version)
        self._num_by_deadline[deadline] = self._num_by_deadline.get(deadline, 0) + 1

    def discard(self, group_id: str) -> None:
        """Record that a group was dropped, which frees its place."""
        if group_id not in self._admitted:
            return
        deadline, _ = self._admitted.pop(group_id)
        ready = self._ready_by_deadline.get(deadline, {})
        if group_id in ready:
            del ready[group_id]
            self._num_ready -= 1
        self._num_by_deadline[deadline] -= 1
        if not self._num_by_deadline[deadline]:
            del self._num_by_deadline[deadline]
            self._ready_by_deadline.pop(deadline, None)

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Record that a group has settled."""
        deadline, _ = self._admitted[group_id]
        self._ready_by_deadline.setdefault(deadline, {})[group_id] = None
        self._num_ready += 1

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch unless groups are overdue; with `is_last`, what is ready; or None."""
        self._observe(version)
        is_full = self._num_ready >= self.groups_per_batch
        if not (is_full or (is_last and self._num_ready)) or self.overdue_ids(version):
            return None
        num_taken = dict[int, int]()  # by deadline, the oldest first
        num_wanted = self.groups_per_batch
        for deadline in sorted(self._ready_by_deadline):
            num_taken[deadline] = min(num_wanted, len(self._ready_by_deadline[deadline]))
            num_wanted -= num_taken[deadline]
        if not is_last and self.late == "wait" and not self._is_feasible_without(num_taken):
            return None
        chosen = {
            group_id
            for deadline, count in num_taken.items()
            for group_id in itertools.islice(self._ready_by_deadline[deadline], count)
        }
        staleness = {
            group_id: version - started for group_id, (_, started) in self._admitted.items() if group_id in chosen
        }
        for group_id in staleness:
            self.discard(group_id)
        self._num_batches += 1
        return Selection(staleness=staleness)

    def rollback(self) -> None:
        """Undo the last selection: the batch was empty, and another takes its place."""
        self._num_batches -= 1
        if not self._is_unasked:
            self._progress = min(self._progress, self._num_batches)

    def carry(self, units: int) -> None:
        """Do nothing: batches are whole groups and leave nothing over."""

    def _is_feasible_without(self, num_taken: Mapping[int, int]) -> bool:
        """Return whether *deadlines_stay_feasible* after `num_taken` groups of each deadline are taken."""
        num_before = 0
        for deadline in sorted(self._num_by_deadline):
            num_left = self._num_by_deadline[deadline] - num_taken.get(deadline, 0)
            num_before += num_left
            if num_left and deadline < self._num_batches + 1 + (num_before - 1) // self.groups_per_batch:
                return False
        return True

    def overdue_ids(self, version: int) -> list[str]:
        """Return the groups, ready or not, that are too old to be delivered."""
        overdue = []
        for group_id, (deadline, started) in self._admitted.items():  # the oldest first
            is_late = self.late == "drop" and deadline < self._num_batches
            if version - started <= self.max_staleness and not is_late:
                break
            overdue.append(group_id)
        return overdue
