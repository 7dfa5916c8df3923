"""The band of values from several seeds, and the comparison of another run with it. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llmrl._utils.numbers import wilson_interval

Curve: TypeAlias = Mapping[int, float]
"""Values of a measure by step; each is a mean of scores from 0 to 1."""

Band: TypeAlias = Mapping[int, tuple[float, float]]
"""Lowest and highest value by step."""

_LEAD = 1.0
"""Number of steps by which a run may be earlier or later than the seeds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is inside all bands of a recipe."""

    is_inside: bool
    measure: str = ""
    """The measure that left its band first; empty if the run is inside."""
    step: int | None = None
    """First step outside the band."""
    value: float | None = None
    """Value at that step; None if the run has no value there."""
    low: float | None = None
    high: float | None = None


def band_of(curves: Sequence[Curve], *, num_prompts: int) -> dict[int, tuple[float, float]]:
    """Return the range of values that a further run may have at each step.

    A fourth run of the same distribution is between the lowest and the highest of three runs with a probability of only
    one half. Therefore the range of the seeds is widened for the two ways in which such runs differ:

    - Time of learning: the range covers the steps from one before to one after, with interpolated values.
    - Sampled prompts and answers: each end is moved to the farthest share that a two-proportion
      test with `num_prompts` trials each does not distinguish from the end at the 5 % level. All
      answers to a prompt count as one trial, so the range holds for any correlation within a group.
      It also holds for any scores from 0 to 1, because their variance is at most that of a share.

    Args:
        curves: the measure of each seed. A step that some curves lack is judged by the other curves.
        num_prompts: number of different prompts in one measurement.

    Raises ValueError if there is no curve, or if a value is not from 0 to 1.

    Example:
        >>> band = band_of([{0: 0.1, 1: 0.5}, {0: 0.0, 1: 0.4}], num_prompts=100)
        >>> [(step, round(low, 2), round(high, 2)) for step, (low, high) in band.items()]
        [(0, 0.0, 0.64), (1, 0.0, 0.64)]
    """
    if not any(curves):
        raise ValueError("curves are empty; a band needs the values of at least one seed.")
    if any(not 0 <= value <= 1 for curve in curves for value in curve.values()):
        raise ValueError("a band needs scores from 0 to 1, such as shares; the curves have other values.")
    band = {}
    for step in sorted({step for curve in curves for step in curve}):
        near = [
            _at(curve, place)
            for curve in curves
            if step in curve
            for place in (step - _LEAD, float(step), step + _LEAD)
        ]
        band[step] = _alike(min(near), num_prompts)[0], _alike(max(near), num_prompts)[1]
    return band


def _alike(share: float, size: int) -> tuple[float, float]:
    """Return the lowest and highest share that a pooled z-test does not tell from `share`, with `size` trials each.

    The test uses the variance at the mean m of both shares: (m - share)² = z² m (1 - m) / (2 size). The solutions m of
    this equation are the ends of Wilson's interval for 2 size trials, and the other share is 2 m - share.
    """
    low, high = wilson_interval(share, 2 * size)
    return max(0.0, min(share, 2 * low - share)), min(1.0, max(share, 2 * high - share))


def _at(curve: Curve, place: float) -> float:
    """Return the value at `place`, interpolated between steps; beyond the ends, that of the nearest step."""
    before = max((step for step in curve if step <= place), default=min(curve))
    after = min((step for step in curve if step >= place), default=max(curve))
    if before >= after:
        return curve[before]
    share = (place - before) / (after - before)
    return curve[before] * (1 - share) + curve[after] * share


def judge(curves: Mapping[str, Curve], bands: Mapping[str, Band]) -> Verdict:
    """Return whether a run is inside all bands, and otherwise the first step and measure outside.

    A step without a value counts as outside.

    Example:
        >>> judge({"reward": {1: 0.5, 2: 0.1}}, {"reward": {1: (0.4, 0.6), 2: (0.5, 0.9)}})
        Verdict(is_inside=False, measure='reward', step=2, value=0.1, low=0.5, high=0.9)
    """
    left = [
        (step, measure)
        for measure, band in bands.items()
        for step, (low, high) in band.items()
        if not low <= curves.get(measure, {}).get(step, -1.0) <= high
    ]
    if not left:
        return Verdict(is_inside=True)
    step, measure = min(left)
    low, high = bands[measure][step]
    return Verdict(False, measure, step, curves.get(measure, {}).get(step), low, high)
