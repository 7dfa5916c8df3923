"""Reproducible random latencies and lengths for a `ScriptedEngine`."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

Draw = Callable[..., float]
"""Function that returns a random positive number and ignores its arguments, so that it can be a `latency_s`."""


def log_normal(median: float, sigma: float = 0.5, *, seed: int = 0) -> Draw:
    """Return a function that draws from a log-normal distribution; `sigma` is the logarithm's standard deviation."""
    if median <= 0 or sigma < 0:
        raise ValueError(f"median must be positive and sigma must be at least 0, got {median!r} and {sigma!r}.")
    generator = random.Random(seed)
    location = math.log(median)

    def draw(*_: object) -> float:
        return generator.lognormvariate(location, sigma)

    return draw


def with_stragglers(draw: Draw, value: float, *, one_in: int = 50, seed: int = 0) -> Draw:
    """Return a function that draws `value` with probability 1 / `one_in`, and otherwise from `draw`."""
    if one_in < 1:
        raise ValueError(f"one_in must be at least 1, got {one_in!r}.")
    generator = random.Random(seed)

    def draw_or_straggle(*_: object) -> float:
        return value if generator.randrange(one_in) == 0 else draw()

    return draw_or_straggle


def answers_of_length(draw: Draw, *, end_token_id: int | None = None) -> Callable[..., list[int]]:
    """Return a script for a `ScriptedEngine`: answers of random length, which end with `end_token_id` if it is given.

    Example:
        >>> answers_of_length(log_normal(3.0, 0.0), end_token_id=2)([7, 7])
        [1, 1, 2]
    """

    def answer(prompt_ids: list[int]) -> list[int]:
        num_tokens = max(1, round(draw()))
        return [1] * num_tokens if end_token_id is None else [1] * (num_tokens - 1) + [end_token_id]

    return answer
