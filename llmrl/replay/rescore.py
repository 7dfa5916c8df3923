"""`rescore`: scores the recorded rollouts of a run by another reward function."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import correlation, fmean

from llmrl.replay.conversations import records_of_log
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rewards import group_of, own_rubric, reward_input, score_again

_NUM_SHOWN = 10


@dataclass(slots=True)
class Change:
    """A rollout with its recorded and its new reward."""

    step: int
    rollout_id: str
    before: float
    after: float
    answer: str
    """Last answer of the rollout."""


@dataclass(slots=True)
class Rescored:
    """Comparison of the recorded rewards of a run with those of another function."""

    num_rollouts: int
    """Number of rollouts with both rewards."""
    num_unscored: int
    """Number of rollouts that lack a reward."""
    correlation: float | None
    """Spearman's rank correlation of the rewards; None if either is constant."""
    swapped_share: float
    """Share of the pairs within groups, of unequal rewards, that change their order."""
    signal_share: tuple[float, float]
    """Share of the groups with differing rewards, before and after."""
    rewards: dict[str, float] = field(default_factory=dict)
    """The new rewards, by rollout id."""
    most_changed: list[Change] = field(default_factory=list)
    """The ten rollouts with the largest changes, in descending order."""
    first_error: str = ""
    """First error of the function; empty if there is none."""


def rescore(source: RecordedRun | str | Path, reward: str) -> Rescored:
    """Score all recorded rollouts of a run, or the conversations of a file, by another function.

    Args:
        source: the run, or a file of conversations in OpenAI's format (`records_of_log`).
        reward: `FILE.py:FUNCTION`, a reward function with the usual parameters; states of tools are not recorded.

    Raises:
        FileNotFoundError, ValueError: if the file or the function does not exist.
        ValueError: if there are no rollouts.
        UnknownRewardInput: if the function has a parameter that the records lack.
    """
    rubric = own_rubric(reward)
    if isinstance(source, RecordedRun):
        records = [record for step in source.steps for record in source.records(step)]
    else:
        records = records_of_log(source)
    if not records:
        raise ValueError(f"{getattr(source, 'path', source)} has no rollouts to score.")
    scores = score_again(rubric, records)
    scored = [(record, score.reward) for record, score in zip(records, scores, strict=True) if score.is_scored]
    rewards = {record["rollout_id"]: after for record, after in scored}
    both = [(record, after) for record, after in scored if record.get("is_scored", True)]
    changes = [
        Change(record["step"], record["rollout_id"], record["reward"], after, reward_input(record).completion)
        for record, after in both
    ]
    changes.sort(key=lambda one: -abs(one.after - one.before))
    groups: dict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for record, after in both:
        groups[record["step"], *group_of(record)].append((record["reward"], after))
    pairs = [(a, b) for group in groups.values() for a, b in combinations(group, 2)]
    ordered = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in pairs if a[0] != b[0] and a[1] != b[1]]
    return Rescored(
        num_rollouts=len(both),
        num_unscored=len(records) - len(both),
        correlation=rank_correlation([record["reward"] for record, _ in both], [after for _, after in both]),
        swapped_share=sum(product < 0 for product in ordered) / max(1, len(ordered)),
        rewards=rewards,
        signal_share=(_signal(groups.values(), 0), _signal(groups.values(), 1)),
        most_changed=[one for one in changes[:_NUM_SHOWN] if one.before != one.after],
        first_error=next((score.error for score in scores if score.error), ""),
    )


def _signal(groups: Iterable[list[tuple[float, float]]], side: int) -> float:
    several = [group for group in groups if len(group) > 1]
    if not several:
        return 0.0
    return fmean(len({pair[side] for pair in group}) > 1 for group in several)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; ties get their mean rank. None if one is constant.

    Example:
        >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
        0.5
    """
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [fmean(places[value]) for value in values]
