"""Groups by counting: a group is ready when all its rollouts have settled; then it is decided what stays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from llmrl.data import Rollout

logger = logging.getLogger("llmrl")


class DropReason(StrEnum):
    """Reason why a settled rollout is not delivered; a failed one is dropped for its own `StopReason`."""

    UNSCORED = "unscored"
    NOTHING_TRAINED = "nothing_trained"
    TRUNCATED = "truncated"
    FILTERED = "filtered"
    FAILED_GROUP = "failed_group"
    TOO_FEW_SURVIVORS = "too_few_survivors"
    CONSTANT_REWARDS = "constant_rewards"
    FILTERED_GROUP = "filtered_group"
    POSTPROC = "postproc"
    STALE = "stale"
    OVERSAMPLED = "oversampled"
    RESET = "reset"


Dropped = tuple[Rollout, str]
"""A rollout that is not delivered, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """What of a settled group is delivered. Pure: it only reads the rollouts' records.

    Raises:
        ValueError: if `min_survivors` is below 1.

    Example:
        >>> rollouts = [Rollout(rollout_id=str(i), group_id="g", sample_index=i, group_size=2, is_scored=i == 0,
        ...                     num_completion_tokens=3) for i in range(2)]
        >>> kept, dropped = GroupRules().judge(rollouts)
        >>> [r.rollout_id for r in kept], [(r.rollout_id, why) for r, why in dropped]
        (['0'], [('1', 'unscored')])
    """

    min_survivors: int = 1
    """Scored rollouts that a group needs."""
    drop_failed_groups: bool = False
    """Whether one failed rollout takes its whole group along, as it must where a group is scored together."""
    drop_truncated: bool = False
    """Overlong filtering: rollouts that a limit cut leave batch and baseline (DAPO, section 3.4)."""
    rollout_filter: Callable[[Rollout], bool] | None = None
    """Says of each scored rollout whether it is kept."""
    group_filter: Callable[[Sequence[Rollout]], bool] | None = None
    """Says of a group's survivors whether they are kept; a group that is not is replaced, so that batches are full.
    Dynamic sampling (DAPO, arXiv:2503.14476, equation 11) is `group_filter=advantages.has_signal`, of the
    `MCAdvantage` that the batches go through."""

    def __post_init__(self) -> None:
        if self.min_survivors < 1:
            raise ValueError(f"min_survivors must be at least 1, got {self.min_survivors}.")

    def judge(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Dropped]]:
        """Divide the settled rollouts of one group into those delivered and those dropped; none gets lost."""
        reasons = [self._reason(rollout) for rollout in rollouts]
        kept = [rollout for rollout, reason in zip(rollouts, reasons, strict=True) if not reason]
        whole = ""
        if self.drop_failed_groups and any(not rollout.status.is_success for rollout in rollouts):
            whole = DropReason.FAILED_GROUP
        elif len(kept) < self.min_survivors:
            whole = DropReason.TOO_FEW_SURVIVORS
        elif self.group_filter is not None and not self.group_filter(kept):
            whole = DropReason.CONSTANT_REWARDS if have_equal_rewards(kept) else DropReason.FILTERED_GROUP
        if whole:
            return [], [(rollout, reason or whole) for rollout, reason in zip(rollouts, reasons, strict=True)]
        return kept, [(rollout, reason) for rollout, reason in zip(rollouts, reasons, strict=True) if reason]

    def _reason(self, rollout: Rollout) -> str:
        if not rollout.is_scored:  # what succeeded and has no reward is not dropped for the limit that it met
            return (not rollout.status.is_success and rollout.reason) or DropReason.UNSCORED
        if not rollout.num_completion_tokens:
            return rollout.reason or DropReason.NOTHING_TRAINED
        if self.drop_truncated and rollout.status.name == "TRUNCATED":
            return DropReason.TRUNCATED
        if self.rollout_filter is not None and not self.rollout_filter(rollout):
            return DropReason.FILTERED
        return ""


def have_equal_rewards(rollouts: Sequence[Rollout]) -> bool:
    """Return whether no rollout was rewarded otherwise than another.

    Example:
        >>> have_equal_rewards([])
        True
    """
    return len({rollout.reward for rollout in rollouts}) < 2


class GroupCounter:
    """Counts the settled rollouts of open groups.

    Example:
        >>> counter = GroupCounter()
        >>> counter.open("g", 2)
        >>> first, second = (Rollout(rollout_id=str(i), group_id="g", sample_index=i, group_size=2) for i in (1, 0))
        >>> counter.settle("g", first) is None
        True
        >>> [rollout.sample_index for rollout in counter.settle("g", second)]
        [0, 1]
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, list[Rollout]]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, group_id: str, num_rollouts: int) -> None:
        """Expect so many rollouts of a group.

        Raises:
            ValueError: if the group is open already, or of no rollout.
        """
        if num_rollouts < 1:
            raise ValueError(f"num_rollouts of group {group_id!r} must be at least 1, got {num_rollouts}.")
        if group_id in self._open:
            raise ValueError(f"group {group_id!r} is open already; ids must be unique.")
        self._open[group_id] = (num_rollouts, [])

    def settle(self, group_id: str, rollout: Rollout) -> list[Rollout] | None:
        """Count one more; return the group's rollouts in the order of their samples once all have settled, else None.

        Raises:
            KeyError: if the group is not open.
        """
        num_rollouts, settled = self._open[group_id]
        settled.append(rollout)
        if len(settled) < num_rollouts:
            return None
        del self._open[group_id]
        return sorted(settled, key=lambda rollout: rollout.sample_index)

    def abandon(self, group_id: str) -> list[Rollout]:
        """Expect no more of a group, and return what of it had settled."""
        return self._open.pop(group_id, (0, []))[1]


class CollectionStalled(RuntimeError):
    """Group after group came without anything to train on; their rollouts are in the collector's `rollouts`."""

    dropped: Sequence[Dropped] = ()
    """What was dropped and not delivered before."""


class NoSignal(CollectionStalled):
    """Nothing failed, and group after group had equal rewards or was filtered: too hard, or learned."""


SIGNAL_PATIENCE = 64
"""Groups without signal in a row that are worth a warning: where a task is hard, or learned, most groups are."""

_MAX_WARNINGS = 7
_LEAST_TO_JUDGE = 16
"""Dropped groups from which on it may be said that all to come will be."""


class StallDetector:
    """Warns, then raises, when dropped groups follow each other without one delivered: no silent stall.

    It raises when it would warn for the eighth time. If no group was ever delivered, it raises from 16 dropped groups
    on, since all to come will be dropped for the same reason, such as a forgotten reward.

    Args:
        patience: dropped groups in a row after which it warns, and warns again.
        error: what it raises.

    Raises:
        CollectionStalled: on `dropped`.
    """

    def __init__(self, patience: int, *, error: type[CollectionStalled] = CollectionStalled) -> None:
        self.patience = patience
        self.error = error
        self._has_delivered = False
        self._num_in_row = 0
        self._reasons: dict[str, int] = {}
        self._first_error = ""

    def delivered(self) -> None:
        """Start anew: a group was delivered."""
        self._num_in_row = 0
        self._reasons = {}
        self._first_error = ""
        self._has_delivered = True

    def dropped(self, dropped: Sequence[Dropped]) -> None:
        """Count a group that was dropped whole."""
        self._num_in_row += 1
        for rollout, reason in dropped:
            self._reasons[str(reason)] = self._reasons.get(reason, 0) + 1
            self._first_error = self._first_error or rollout.error
        if self._num_in_row % self.patience:
            return
        why = f"rollouts dropped by reason: {self._reasons}"
        why += f"; the first error: {self._first_error}" if self._first_error else ""
        limit = _MAX_WARNINGS * self.patience
        if not self._has_delivered:
            limit = min(limit, max(self.patience, _LEAST_TO_JUDGE - 1))
        if self._num_in_row > limit:
            raise self.error(f"{self._num_in_row} groups in a row had nothing to train on; {why}.")
        logger.warning("%d groups in a row had nothing to train on; %s", self._num_in_row, why)
