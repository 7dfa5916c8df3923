"""Estimators of KL(policy || other) from the policy's own samples: Schulman (2020), "Approximating KL divergence"."""

from __future__ import annotations

from typing import Literal, get_args

import torch

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor, estimator: KLEstimator = "k3") -> torch.Tensor:
    """One estimate a token, with `d = log other - log policy`.

    `k1 = -d` is unbiased and may be negative; `k2 = d^2 / 2` has the gradient of the reverse KL on policy;
    `k3 = exp(d) - 1 - d` is unbiased and never negative (GRPO, arXiv:2402.03300, equation 4).

    Raises:
        ValueError: for an unknown estimator.

    Example:
        >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0]))
        tensor([0.])
    """
    difference = other_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return difference.expm1() - difference
    raise ValueError(f"estimator must be one of {list(get_args(KLEstimator))}, got {estimator!r}.")
