"""Statistics of an evaluation: pass@k, and confidence intervals of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llmrl._utils.numbers import wilson_interval


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of `k` answers to a problem is right.

    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    Raises ValueError unless `1 <= k <= num_samples` and `0 <= num_right <= num_samples`.

    Example:
        >>> pass_at_k(4, 2, 1), pass_at_k(4, 2, 4)
        (0.5, 1.0)
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be between 1 and num_samples={num_samples}, got {k}.")
    if not 0 <= num_right <= num_samples:
        raise ValueError(f"num_right must be between 0 and num_samples={num_samples}, got {num_right}.")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def interval_of_mean(problem_means: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean score in [0, 1].

    Standard errors are clustered by problem (Miller 2024, "Adding Error Bars to Evals", section 2.2). The interval is
    Wilson's (1927) at the effective sample size, so its width is not zero for means of 0 and 1.

    Args:
        problem_means: mean score of each problem's answers.

    Raises ValueError if there are no problems, or if a score is outside [0, 1].

    Example:
        >>> low, high = interval_of_mean([1.0] * 25)
        >>> round(low, 3), round(high, 3)
        (0.867, 1.0)
    """
    num_problems = len(problem_means)
    if not num_problems:
        raise ValueError("problem_means is empty; a mean needs at least one problem.")
    if min(problem_means) < 0 or max(problem_means) > 1:
        raise ValueError(
            f"problem_means range from {min(problem_means)} to {max(problem_means)}; "
            "this interval requires scores in [0, 1]."
        )
    mean = sum(problem_means) / num_problems
    squares = sum((value - mean) ** 2 for value in problem_means)
    size = float(num_problems)
    if squares and min(problem_means) < max(problem_means):  # equal means may leave a rounding error
        error_squared = squares / (num_problems - 1) / num_problems
        size = max(size, mean * (1 - mean) / error_squared)
    return wilson_interval(mean, size)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def estimate_of_mean(problem_means: Sequence[float]) -> Estimate:
    """Return the mean of scores in [0, 1], one per problem, with its `interval_of_mean`."""
    return Estimate(sum(problem_means) / len(problem_means), *interval_of_mean(problem_means))
