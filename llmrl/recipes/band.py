"""The band that some seeds draw, and the judgement of another run against it. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llmrl.runs.estimates import wilson_interval

Curve: TypeAlias = Mapping[int, float]
"""A measure by step: the mean of scores from 0 to 1."""

Band: TypeAlias = Mapping[int, tuple[float, float]]
"""Lowest and highest value by step."""

_LEAD = 1.0
"""Number of steps by which a run may learn earlier or later than the seeds."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a run is inside all bands of a recipe."""

    is_inside: bool
    measure: str = ""
    """The measure that left its band first; empty if none did."""
    step: int | None = None
    """Step at which it left."""
    value: float | None = None
    """Value at that step; None if the run has none."""
    low: float | None = None
    high: float | None = None


def band_of(curves: Sequence[Curve], *, num_prompts: int) -> dict[int, tuple[float, float]]:
    """Return the values that a further run may have at each step.

    A fourth run of the same distribution is between the lowest and the highest of three with a probability of only one
    half, so the range of the seeds is widened by the two things in which such runs differ:

    - when they learn: the range is over the steps from one before to one after, with values between steps
      interpolated;
    - which prompts and answers they happened to measure: both ends are moved to the last share that a test of two
      shares, of `num_prompts` each, does not tell from the end at 5 %. Answers to the same prompt count once, as if
      they were equal, so this holds for any correlation in a group, and for any scores from 0 to 1: their variance is
      at most that of a share.

    Args:
        curves: the measure of each seed; steps that only some have are judged by those.
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
        raise ValueError("a band is of scores from 0 to 1, such as shares; the curves have others.")
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
    """Return the lowest and highest share of `size` trials that a pooled z-test does not tell from another of `size`.

    The test takes the variance at the middle m of both shares: (m - share)² = z² m (1 - m) / (2 size). This equation
    has the ends of Wilson's interval for twice the trials as its solutions.
    """
    low, high = wilson_interval(share, 2 * size)
    return max(0.0, min(share, 2 * low - share)), min(1.0, max(share, 2 * high - share))


def _at(curve: Curve, place: float) -> float:
    """Return the value at a place between steps, that of the nearest step beyond the ends."""
    before = max((step for step in curve if step <= place), default=min(curve))
    after = min((step for step in curve if step >= place), default=max(curve))
    if before >= after:
        return curve[before]
    share = (place - before) / (after - before)
    return curve[before] * (1 - share) + curve[after] * share


def judge(curves: Mapping[str, Curve], bands: Mapping[str, Band]) -> Verdict:
    """Return the first step at which a run left a band, and the band of the measure that left it.

    A run that has no value at a step of the band has left it there.

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
