"""Metrics of a run in the form that its health checks need: smoothed values, initial values, and noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

from llmrl._utils.numbers import wilson_interval
from llmrl.collectors.groups import SIGNAL_PATIENCE

Metrics: TypeAlias = Mapping[str, float]
NUM_SMOOTHED = 3
"""Number of steps to average, because a batch of few prompts is noisy."""
SURE = 3.5
"""Number of standard errors of a significant difference; large, because many steps and metrics are compared."""
SURE_OF_SHARE = 2.6
"""As `SURE`, for shares, which are bounded."""


class MetricHistory:
    """Metrics of the steps so far, in order: latest, smoothed, initial values, and noise.

    The history records which steps were read, because these are the steps that a finding examined.
    Reads for the noise (`margin`) do not count.
    """

    def __init__(self, steps: Sequence[Metrics], numbers: Sequence[int] | None = None) -> None:
        self.steps = steps
        self.last: Metrics = steps[-1] if steps else {}
        self._numbers = numbers or range(1, len(steps) + 1)
        self._read: set[int] = set()

    def note(self, *places: int) -> None:
        """Mark the steps at these places as read."""
        self._read.update(places)

    def take_read(self) -> tuple[int, int] | None:
        """Return the first and last step read since the last call, or the last step if none was read."""
        if not self.steps:
            return None
        places = self._read or {len(self.steps) - 1}
        self._read = set()
        return self._numbers[min(places)], self._numbers[max(places)]

    def _places(self, name: str) -> list[int]:
        return [place for place, step in enumerate(self.steps) if name in step]

    def _noted(self, name: str, places: Sequence[int]) -> list[float]:
        self.note(*places)
        return [self.steps[place][name] for place in places]

    def values(self, name: str) -> list[float]:
        """Return a metric's values in step order, without the steps that lack it."""
        return self._noted(name, self._places(name))

    def now(self, name: str) -> float | None:
        """Return a metric of the last step; None if the step lacks it."""
        if name in self.last:
            self.note(len(self.steps) - 1)
        return self.last.get(name)

    def recent(self, name: str) -> float | None:
        """Return a metric's mean over the last few steps, or None if the last step lacks it."""
        return None if self.now(name) is None else fmean(self._noted(name, self._places(name)[-NUM_SMOOTHED:]))

    def began(self, name: str) -> float | None:
        """Return a metric's mean over the first few steps, or None if there are no further steps."""
        places = self._places(name)
        return fmean(self._noted(name, places[:NUM_SMOOTHED])) if len(places) > NUM_SMOOTHED else None

    def share(self, name: str, counted: str) -> tuple[float, float] | None:
        """Return a share over the last few steps and its lower confidence bound, or None if the last step lacks it.

        `counted` is the metric with the denominator; if a step lacks it, the bound is the share itself.
        """
        if self.now(name) is None:
            return None
        places = self._places(name)[-NUM_SMOOTHED:]
        self.note(*places)
        steps = [self.steps[place] for place in places]
        counts = [step.get(counted, math.inf) for step in steps]
        if math.inf in counts or not sum(counts):
            share = fmean(step[name] for step in steps)
            return share, share
        total = sum(counts)
        share = sum(step[name] * count for step, count in zip(steps, counts, strict=True)) / total
        low, _ = wilson_interval(share, total, SURE_OF_SHARE)
        return share, low

    def margin(self, name: str) -> float:
        """Return the largest difference of two means over a few steps that chance explains; 0 with too few steps.

        The noise is estimated from differences of consecutive steps, without the last few steps and
        the largest difference. A trend makes the estimate too large.
        """
        values = [self.steps[place][name] for place in self._places(name)[:-NUM_SMOOTHED]]
        squares = sorted((later - earlier) ** 2 for earlier, later in itertools.pairwise(values))[:-1]
        if len(squares) < 2:
            return 0.0
        noise = math.sqrt(fmean(squares) / 2)
        return SURE * (1 + 4 / len(squares)) * noise * math.sqrt(2 / NUM_SMOOTHED)

    def around(self, place: int, name: str) -> float | None:
        """Return the mean of the last few steps up to a place, or of the first few steps if there are none."""
        places = self._places(name)
        chosen = [one for one in places if one <= place][-NUM_SMOOTHED:] or places[:NUM_SMOOTHED]
        return fmean(self._noted(name, chosen)) if chosen else None

    def best(self, name: str) -> float | None:
        """Return the highest mean over a few consecutive steps, without the last few; None with too few steps."""
        values = self.values(name)[:-NUM_SMOOTHED]
        windows = [values[end - NUM_SMOOTHED : end] for end in range(NUM_SMOOTHED, len(values) + 1)]
        return max(map(fmean, windows), default=None)

    def is_learning(self) -> bool:
        """Return whether the last reward is the highest so far, or the reward has risen (`has_risen`)."""
        *earlier, now = self.values("reward_mean") or [0.0]
        return bool(earlier) and (now > max(earlier) or self.has_risen())

    def has_risen(self) -> bool:
        """Return whether the reward is clearly above its initial value, and not below its best."""
        values = self.values("reward_mean")
        began = self.began("reward_mean")
        best = self.best("reward_mean")
        if len(values) < 2 or began is None or best is None:
            return False
        recent = fmean(values[-NUM_SMOOTHED:])
        margin = self.margin("reward_mean")
        return recent > began + margin and recent >= best - margin

    def has_settled(self, name: str) -> bool:
        """Return whether a metric was measured for a few steps, and the reward no longer rises."""
        return len(self._places(name)) >= NUM_SMOOTHED and not self.is_learning()

    def is_constant(self) -> bool:
        """Return whether all rewards of the last step are equal."""
        return self.now("reward_std") == 0

    def has_many_prompts(self) -> bool:
        """Return whether the last step has enough prompts to be judged alone: a hard task begins with equal rewards."""
        return (self.now("num_groups") or math.inf) >= SIGNAL_PATIENCE

    def is_learned(self) -> bool:
        """Return whether most answers are right, or have the highest reward seen so far."""
        tops = self.values("reward_max")
        # If a step does not know which answers are right, the other steps do not either.
        knows_right = all("groups_all_right" in step for step in self.steps if "num_groups" in step)
        if knows_right and (self.now("groups_all_right") == 1 or (self.recent("groups_all_right") or 0.0) > 0.5):
            return True
        mean = self.recent("reward_mean")
        has_differed = any(self.values("reward_std"))
        return bool(tops) and mean is not None and has_differed and mean >= 0.8 * max(tops) > 0
