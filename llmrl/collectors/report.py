"""Statistics of a collection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tensordict import TensorDictBase

from llmrl.collectors.groups import Dropped, DropReason, have_equal_rewards
from llmrl.collectors.scheduler import ReadyBatch
from llmrl.data import Rollout
from llmrl.data.ragged import has_entry, value_column

_ROLLOUT_ID = ("rollout", "rollout_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionReport:
    """Statistics of one collected batch, with every drop counted by its reason.

    Example:
        >>> report = CollectionReport.of([], seconds=1.0)
        >>> report.num_rollouts, report.tokens_per_second
        (0, 0.0)
    """

    num_rollouts: int
    num_turns: int
    num_completion_tokens: int
    seconds: float
    mean_reward: float
    """Mean reward of the scored rollouts; NaN if no rollout is scored."""
    mean_completion_tokens: float
    """Mean number of sampled tokens per rollout."""
    num_by_status: dict[str, int] = field(default_factory=dict)
    num_dropped_by_reason: dict[str, int] = field(default_factory=dict)
    mean_staleness: float = 0.0
    """Mean number of versions between a group's start and its delivery."""
    max_staleness: int = 0
    num_forks: int = 0
    """Number of rows started because history was rewritten; no tokens are lost."""
    num_realigned_tokens: int = 0
    """Number of sampled tokens that are not trained on, because their answer's end was edited."""

    @property
    def tokens_per_second(self) -> float:
        """Number of sampled tokens per second of collection."""
        return self.num_completion_tokens / self.seconds if self.seconds else 0.0

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics by their names in the run folder; undefined values are left out."""
        num_dropped = sum(self.num_dropped_by_reason.values())
        return {
            **({} if math.isnan(self.mean_reward) else {"reward_mean": self.mean_reward}),
            "completion_tokens_mean": self.mean_completion_tokens,
            "tokens_per_second": self.tokens_per_second,
            "generate_seconds": self.seconds,
            "staleness_mean": self.mean_staleness,
            "staleness_max": float(self.max_staleness),
            "num_rollouts": float(self.num_rollouts),
            **({"trained_share": 1 - num_dropped / self.num_rollouts} if self.num_rollouts else {}),
            "num_dropped": float(num_dropped),
            "num_forks": float(self.num_forks),
            "num_realigned_tokens": float(self.num_realigned_tokens),
            **{f"num_{name}": float(self.num_by_status.get(name, 0)) for name in ("completed", "truncated", "error")},
        }

    def __str__(self) -> str:
        dropped = ", ".join(f"{count} {reason}" for reason, count in self.num_dropped_by_reason.items()) or "none"
        rewrites = {"forks": self.num_forks, "sampled tokens realigned and not trained": self.num_realigned_tokens}
        return (
            f"{self.num_rollouts} rollouts, {self.num_turns} turns, {self.num_completion_tokens} tokens in "
            f"{self.seconds:.1f} s ({self.tokens_per_second:.0f}/s); mean reward {self.mean_reward:.3f}; "
            f"dropped: {dropped}{''.join(f'; {count} {what}' for what, count in rewrites.items() if count)}"
        )

    @classmethod
    def of(
        cls,
        rollouts: Sequence[Rollout],
        *,
        seconds: float,
        dropped: Sequence[Dropped] = (),
        staleness: Sequence[int] = (),
    ) -> CollectionReport:
        """Compute the statistics of `rollouts`, which include the dropped ones."""
        scored = [rollout.reward for rollout in rollouts if rollout.is_scored]
        num_completion_tokens = sum(rollout.num_completion_tokens for rollout in rollouts)
        return cls(
            num_rollouts=len(rollouts),
            num_turns=sum(rollout.num_turns for rollout in rollouts),
            num_completion_tokens=num_completion_tokens,
            seconds=seconds,
            mean_reward=sum(scored) / len(scored) if scored else math.nan,
            mean_completion_tokens=num_completion_tokens / max(1, len(rollouts)),
            num_by_status=dict(Counter(rollout.status.name.lower() for rollout in rollouts)),
            num_dropped_by_reason=dict(Counter(str(reason) for _, reason in dropped)),
            mean_staleness=sum(staleness) / max(1, len(staleness)),
            max_staleness=max(staleness, default=0),
            num_forks=sum(rollout.num_forks for rollout in rollouts),
            num_realigned_tokens=sum(rollout.num_realigned_tokens for rollout in rollouts),
        )


@dataclass(slots=True, kw_only=True)
class CollectionTally:
    """Results since the last batch that was not empty."""

    is_grouped: bool
    """Whether batches are training rows."""
    rollouts: list[Rollout] = field(default_factory=list)
    """All rollouts, dropped or not, each once."""
    dropped: list[Dropped] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, delivery: ReadyBatch, *, seconds: float) -> None:
        """Add a delivery."""
        self.rollouts += delivery.rollouts
        self.dropped += delivery.dropped
        self.staleness += delivery.staleness
        self.seconds += seconds

    def leave_out(self, groups: Sequence[Sequence[Rollout]], batch: TensorDictBase | None) -> list[Dropped]:
        """Count and return the rollouts of the delivered groups that are not in their batch.

        A rollout that was left out before, as by `postproc` before the buffer's transforms, is not counted again.
        A non-empty batch without rollout ids is ignored, since it does not say what it contains.
        """
        if not self.is_grouped:
            return []
        kept_ids = set()
        if batch is not None and batch.batch_size.numel():
            if not has_entry(batch, _ROLLOUT_ID):
                return []
            kept_ids = set(value_column(batch, _ROLLOUT_ID))
        left_out: list[Dropped] = []
        for group in groups:
            missing = [rollout for rollout in group if rollout.rollout_id not in kept_ids]
            reason = DropReason.POSTPROC
            if len(missing) == len(group) and have_equal_rewards(group):
                reason = DropReason.CONSTANT_REWARDS
            left_out += [(rollout, reason) for rollout in missing]
        counted_ids = {rollout.rollout_id for rollout, _ in self.dropped}
        self.dropped += [one for one in left_out if one[0].rollout_id not in counted_ids]
        return left_out

    def report(self) -> CollectionReport:
        """Return the statistics."""
        return CollectionReport.of(self.rollouts, seconds=self.seconds, dropped=self.dropped, staleness=self.staleness)
