"""The metrics of a run so far, as its health looks at them: smoothed, at the beginning, and with their noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeAlias

Metrics: TypeAlias = Mapping[str, float]
NUM_SMOOTHED = 3
"""Steps that are averaged, since a batch of few prompts is noisy."""
SURE = 3.5
"""Standard errors by which something differs that is not called chance; steps are many, and so are findings."""
SURE_OF_SHARE = 2.6
"""The same of shares, which are bounded."""


class MetricHistory:
    """Metrics of the steps so far: now, smoothed, as they began, and how noisy they are.

    It notes which steps were read, so that a finding can say what it looked at. Noise (`margin`) does not count.

    Args:
        steps: metrics of all steps in order.
        numbers: numbers of these steps; by default they count from 1.
    """

    def __init__(self, steps: Sequence[Metrics], numbers: Sequence[int] | None = None) -> None:
        self.steps = steps
        self.last: Metrics = steps[-1] if steps else {}
        self._numbers = range(1, len(steps) + 1) if numbers is None else numbers
        self._read: set[int] = set()

    def note(self, *places: int) -> None:
        """Note that the steps at these places were read."""
        self._read.update(places)

    def take_read(self) -> tuple[int, int] | None:
        """Return the first and the last step that were read since the last call; the last step if none was."""
        places = self._read or {len(self.steps) - 1}
        self._read = set()
        return (self._numbers[min(places)], self._numbers[max(places)]) if self.steps else None

    def _places(self, name: str) -> list[int]:
        return [place for place, step in enumerate(self.steps) if name in step]

    def _noted(self, name: str, places: Sequence[int]) -> list[float]:
        self.note(*places)
        return [self.steps[place][name] for place in places]

    def values(self, name: str) -> list[float]:
        """Return a metric's values, step by step, without the steps that lack it."""
        return self._noted(name, self._places(name))

    def now(self, name: str) -> float | None:
        """Return a metric of the last step."""
        if name in self.last:
            self.note(len(self.steps) - 1)
        return self.last.get(name)

    def recent(self, name: str) -> float | None:
        """Return the mean of the last few steps; None where the last has no such metric."""
        return None if self.now(name) is None else fmean(self._noted(name, self._places(name)[-NUM_SMOOTHED:]))

    def began(self, name: str) -> float | None:
        """Return the mean of the first few steps, once there are more."""
        places = self._places(name)
        return fmean(self._noted(name, places[:NUM_SMOOTHED])) if len(places) > NUM_SMOOTHED else None

    def share(self, name: str, counted: str) -> tuple[float, float] | None:
        """Return a share of the last few steps, and what it is at least, chance aside; None where the last has none.

        Args:
            name: name of the metric.
            counted: metric with the number that it is a share of; without it chance is left out.
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
        # The lower end of Wilson's interval.
        square = SURE_OF_SHARE**2 / total
        spread = SURE_OF_SHARE * math.sqrt(max(0.0, share * (1 - share)) / total + square / (4 * total))
        return share, (share + square / 2 - spread) / (1 + square)

    def margin(self, name: str) -> float:
        """Return by how much two means of a few steps differ by chance, at most; 0 where too few steps tell it.

        The noise is what one step differs from the one before, in the steps before the last few, the largest difference
        aside, which may be what is looked for. Of a metric that moves steadily that is too much rather than too little.
        """
        values = [self.steps[place][name] for place in self._places(name)[:-NUM_SMOOTHED]]
        squares = sorted((later - earlier) ** 2 for earlier, later in itertools.pairwise(values))[:-1]
        if len(squares) < 2:
            return 0.0
        noise = math.sqrt(fmean(squares) / 2)
        return SURE * (1 + 4 / len(squares)) * noise * math.sqrt(2 / NUM_SMOOTHED)

    def around(self, place: int, name: str) -> float | None:
        """Return the mean of the few steps that end at a place; of the first few, where there were none before."""
        places = self._places(name)
        chosen = [one for one in places if one <= place][-NUM_SMOOTHED:] or places[:NUM_SMOOTHED]
        return fmean(self._noted(name, chosen)) if chosen else None

    def best(self, name: str) -> float | None:
        """Return the highest mean of a few steps in a row, before the last few; None where there are none."""
        values = self.values(name)[:-NUM_SMOOTHED]
        windows = [values[end - NUM_SMOOTHED : end] for end in range(NUM_SMOOTHED, len(values) + 1)]
        return max(map(fmean, windows), default=None)

    def is_learning(self) -> bool:
        """Return whether the reward is higher than it began, and not lower than it was."""
        *earlier, now = self.values("reward_mean") or [0.0]
        if not earlier:
            return False
        if now > max(earlier):
            return True
        recent = fmean([*earlier, now][-NUM_SMOOTHED:])
        began = self.began("reward_mean")
        best = self.best("reward_mean")
        margin = self.margin("reward_mean")
        return began is not None and best is not None and recent > began + margin and recent >= best - margin

    def is_learned(self) -> bool:
        """Return whether most answers are right: they have the highest reward that any had, or are called right."""
        tops = self.values("reward_max")
        # Where one step's rewards do not say what is right, those of the others do not, either.
        knows_right = all("groups_all_right" in step for step in self.steps if "num_groups" in step)
        if knows_right and (self.recent("groups_all_right") or 0.0) > 0.5:
            return True
        mean = self.recent("reward_mean")
        has_differed = any(self.values("reward_std"))
        return bool(tops) and mean is not None and has_differed and mean >= 0.8 * max(tops) > 0
