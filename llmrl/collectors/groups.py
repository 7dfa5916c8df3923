"""Groups of rollouts: when a group is complete, and which of its rollouts are delivered."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from llmrl._utils.arguments import check_least
from llmrl.data import Rollout, RolloutStatus

logger = logging.getLogger(__name__)


class DropReason(StrEnum):
    """Reason why a settled rollout is not delivered; a failed one has its `StopReason`."""

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
"""A rollout that is not delivered, and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRules:
    """Rules that select the rollouts of a settled group, based on the rollouts' records only.

    Example:
        >>> rollouts = [Rollout(rollout_id=str(i), group_id="g", sample_index=i, group_size=2, is_scored=i == 0,
        ...                     num_completion_tokens=3) for i in range(2)]
        >>> kept, dropped = GroupRules().judge(rollouts)
        >>> [r.rollout_id for r in kept], [(r.rollout_id, str(why)) for r, why in dropped]
        (['0'], [('1', 'unscored')])
    """

    min_survivors: int = 1
    """Minimum number of scored rollouts per group, at least 1."""
    drop_failed_groups: bool = False
    """Whether one failed rollout drops its whole group, as needed if groups are scored together."""
    drop_truncated: bool = False
    """Whether to drop truncated rollouts (overlong filtering, DAPO, section 3.4)."""
    rollout_filter: Callable[[Rollout], bool] | None = None
    """Predicate that says whether to keep a scored rollout."""
    group_filter: Callable[[Sequence[Rollout]], bool] | None = None
    """Predicate that says whether to keep a group's remaining rollouts; rejected groups are replaced. For dynamic
    sampling (DAPO, arXiv:2503.14476, equation 11) pass `has_signal` of the batches' `MCAdvantage`."""

    def __post_init__(self) -> None:
        check_least(1, min_survivors=self.min_survivors)

    def judge(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], list[Dropped]]:
        """Divide the settled rollouts of one group into those delivered and those dropped."""
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
            kept = []
        pairs = zip(rollouts, reasons, strict=True)
        return kept, [(rollout, reason or whole) for rollout, reason in pairs if reason or whole]

    def _reason(self, rollout: Rollout) -> str:
        if not rollout.is_scored:  # a successful rollout is dropped as unscored, even if it met a limit
            return (not rollout.status.is_success and rollout.reason) or DropReason.UNSCORED
        if not rollout.num_completion_tokens:
            return rollout.reason or DropReason.NOTHING_TRAINED
        if self.drop_truncated and rollout.status is RolloutStatus.TRUNCATED:
            return DropReason.TRUNCATED
        if self.rollout_filter is not None and not self.rollout_filter(rollout):
            return DropReason.FILTERED
        return ""


def have_equal_rewards(rollouts: Sequence[Rollout]) -> bool:
    """Return whether all rollouts have the same reward.

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
        """Expect `num_rollouts` rollouts; raise ValueError below 1, or if the group is open."""
        if num_rollouts < 1:
            raise ValueError(f"num_rollouts of group {group_id!r} must be at least 1, got {num_rollouts}.")
        if group_id in self._open:
            raise ValueError(f"group {group_id!r} is open already; ids must be unique.")
        self._open[group_id] = (num_rollouts, [])

    def settle(self, group_id: str, rollout: Rollout) -> list[Rollout] | None:
        """Count a rollout; return all once they have settled, by `sample_index`, else None."""
        num_rollouts, settled = self._open[group_id]
        settled.append(rollout)
        if len(settled) < num_rollouts:
            return None
        del self._open[group_id]
        return sorted(settled, key=lambda rollout: rollout.sample_index)

    def abandon(self, group_id: str) -> list[Rollout]:
        """Close a group and return those of its rollouts that have settled."""
        return self._open.pop(group_id, (0, []))[1]


class CollectionStalled(RuntimeError):
    """Too many groups in a row have nothing to train on; see the collector's `rollouts`."""

    dropped: Sequence[Dropped] = ()
    """Rollouts dropped since the last delivery."""


class NoSignal(CollectionStalled):
    """No group failed, but too many in a row were filtered out or had equal rewards."""


SIGNAL_PATIENCE = 64
"""Groups in a row without signal before a warning; hard or solved tasks have many."""

_MAX_WARNINGS = 7
_LEAST_TO_JUDGE = 16
"""Minimum number of dropped groups before an early stop if no group was ever delivered."""


class StallDetector:
    """Warns after every `patience` groups that are dropped in a row, and raises `error` in place of the eighth warning.

    If no group was ever delivered, an earlier warning except the first becomes the error, once at least 16 groups were
    dropped, since all groups probably fail for the same reason, such as a missing reward.
    """

    def __init__(self, patience: int, *, error: type[CollectionStalled] = CollectionStalled) -> None:
        self.patience = patience
        self.error = error
        self._has_delivered = False
        self._num_in_row = 0
        self._reasons = Counter[str]()
        self._first_error = ""

    def delivered(self) -> None:
        """Reset the count, since a group was delivered."""
        self._num_in_row = 0
        self._reasons.clear()
        self._first_error = ""
        self._has_delivered = True

    def dropped(self, dropped: Sequence[Dropped]) -> None:
        """Count a group that was dropped as a whole."""
        self._num_in_row += 1
        for rollout, reason in dropped:
            cause = str(reason)
            if rollout.reason not in ("", reason):  # a limit that an agent met
                cause += f" ({rollout.reason})"
            self._reasons[cause] += 1
            self._first_error = self._first_error or rollout.error
        if self._num_in_row % self.patience:
            return
        why = f"rollouts dropped by reason: {dict(self._reasons)}"
        if self._first_error:
            why += f"; the first error: {self._first_error}"
        limit = _MAX_WARNINGS * self.patience
        if not self._has_delivered:
            limit = min(limit, max(self.patience, _LEAST_TO_JUDGE - 1))
        if self._num_in_row > limit:
            raise self.error(f"{self._num_in_row} groups in a row had nothing to train on; {why}.")
        logger.warning("%d groups in a row had nothing to train on; %s", self._num_in_row, why)
