"""Staleness, bounded by admission: how far ahead of the trainer collection may run."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Literal

from llmrl.collectors.admission import Selection

LatePolicy = Literal["wait", "drop"]


class StalenessGate:
    """Lets collection run ahead of training by at most `max_staleness` versions.

    Batch number `b` (from 0) is trained on at version `b`, one update per batch. A group that starts at version `v` has
    the deadline `v + max_staleness`: the last batch it may be in. Two rules keep the bound:

    - *admission_is_bounded*: at version `v` at most `(v + max_staleness + 1) * groups_per_batch` groups have been
      admitted that were or will be delivered, so that there is room for each before its deadline;
    - *deadlines_stay_feasible* (`late="wait"`): a batch is made of the oldest groups that are ready, and only when
      the groups that remain can still all meet their deadlines: the `i`-th of them, in order of deadlines, is in batch
      `b + 1 + i // groups_per_batch` or before. Otherwise the batch waits for the stragglers.

    With `late="drop"` nothing waits: groups past their deadline are dropped and refilled. In both, a group that
    started more than `max_staleness` true versions ago is never delivered, however often weights are updated.

    The trainer's progress is known by two signs: a new version, or its asking for the next batch without one.

    Args:
        groups_per_batch: groups in a batch.
        max_staleness: versions between the start of a group and the update it is used for; 0 is on-policy.
        late: what happens when a group is slower than the bound allows.

    Raises:
        ValueError: if a number is out of range or `late` is unknown.

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

    def __init__(self, groups_per_batch: int, *, max_staleness: int, late: LatePolicy = "wait") -> None:
        if groups_per_batch < 1:
            raise ValueError(f"groups_per_batch must be at least 1, got {groups_per_batch}.")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0 (on-policy), got {max_staleness}.")
        if late not in ("wait", "drop"):
            raise ValueError(f"late must be 'wait' or 'drop', got {late!r}.")
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self.late = late
        self.follows_versions = True
        self.rest_reason: str | None = None
        self._is_unasked = False
        self._num_batches = 0
        self._progress = 0  # the batch that the trainer needs next, as far as is known
        self._version: int | None = None
        self._admitted: dict[str, tuple[int, int]] = {}  # id: (deadline, true version at admission), in order
        self._order: dict[str, int] = {}
        self._num_admitted = 0
        self._num_ready = 0
        self._ready_by_deadline: dict[int, dict[str, None]] = {}
        self._num_by_deadline: dict[int, int] = {}

    @property
    def live_ids(self) -> list[str]:
        """Groups that are being played or ready, in order of admission."""
        return list(self._admitted)

    def request_batch(self) -> None:
        """Record that the consumer waits for its next batch: it has finished those before, whatever the version."""
        if self._is_unasked:
            return
        self._progress = max(self._progress, self._num_batches)

    def run_unasked(self) -> None:
        """Follow new versions only: filling a buffer requests the next batch at once, trained or not."""
        self._is_unasked = True

    def _observe(self, version: int) -> None:
        if self._version is None:
            self._version = version
        if version > self._version:
            self._progress += version - self._version
            self._version = version
            if not self._is_unasked:  # several updates per batch are no licence to run further ahead
                self._progress = min(self._progress, self._num_batches)

    def num_admissible(self, version: int) -> int:
        """Return how many groups may be admitted now: *admission_is_bounded*."""
        self._observe(version)
        allowed = (self._progress + self.max_staleness + 1) * self.groups_per_batch
        return max(0, allowed - self._num_batches * self.groups_per_batch - len(self._admitted))

    def admit(self, group_id: str, version: int) -> None:
        """Note that a group was started."""
        self._observe(version)
        deadline = self._progress + self.max_staleness
        self._admitted[group_id] = (deadline, version)
        self._order[group_id] = self._num_admitted
        self._num_admitted += 1
        self._num_by_deadline[deadline] = self._num_by_deadline.get(deadline, 0) + 1

    def discard(self, group_id: str) -> None:
        """Note that a group was dropped; its place is free again."""
        if group_id not in self._admitted:
            return
        deadline, _ = self._admitted.pop(group_id)
        del self._order[group_id]
        if self._ready_by_deadline.get(deadline, {}).pop(group_id, self) is None:
            self._num_ready -= 1
        self._num_by_deadline[deadline] -= 1
        if not self._num_by_deadline[deadline]:
            del self._num_by_deadline[deadline]
            self._ready_by_deadline.pop(deadline, None)

    def mark_ready(self, group_id: str, units: int = 1) -> None:
        """Note that a group has settled."""
        deadline, _ = self._admitted[group_id]
        self._ready_by_deadline.setdefault(deadline, {})[group_id] = None
        self._num_ready += 1

    def select(self, version: int, *, is_last: bool = False) -> Selection | None:
        """Return a full batch, or None if there is none; with `is_last` return what there is.

        Nothing is selected while `overdue_ids` have not been discarded.
        """
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
        chosen = [
            group_id
            for deadline, count in num_taken.items()
            for group_id in itertools.islice(self._ready_by_deadline[deadline], count)
        ]
        group_ids = sorted(chosen, key=self._order.__getitem__)
        staleness = {group_id: version - self._admitted[group_id][1] for group_id in group_ids}
        for group_id in group_ids:
            self.discard(group_id)
        self._num_batches += 1
        return Selection(group_ids=group_ids, staleness=staleness)

    def rollback(self) -> None:
        """Take back the batch that was selected last, which was empty; another takes its place and its versions."""
        self._num_batches -= 1
        if not self._is_unasked:
            self._progress = min(self._progress, self._num_batches)

    def carry(self, units: int) -> None:
        """Do nothing: its batches are whole groups, and nothing is left over by them."""

    def _is_feasible_without(self, num_taken: Mapping[int, int]) -> bool:
        """Return whether *deadlines_stay_feasible*, were so many of each deadline taken as the next batch."""
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
        for group_id, (deadline, started) in self._admitted.items():  # in order of admission: the oldest first
            if version - started <= self.max_staleness and (self.late == "wait" or deadline >= self._num_batches):
                break
            overdue.append(group_id)
        return overdue
