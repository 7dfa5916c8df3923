"""Estimators of KL(policy || other) from the policy's own samples: Schulman (2020), "Approximating KL divergence"."""

from __future__ import annotations

from typing import Literal, get_args

import torch

from llmrl.objectives.ratios import MAX_LOG_RATIO, is_out_of_range

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimate(log_probs: torch.Tensor, other_log_probs: torch.Tensor, estimator: KLEstimator = "k3") -> torch.Tensor:
    """Return an estimate of the KL divergence per token, with `d = log other - log policy`.

    `k1 = -d` is unbiased and may be negative; `k2 = d^2 / 2` has the gradient of the reverse KL for on-policy samples;
    `k3 = exp(d) - 1 - d` is unbiased and never negative (GRPO, arXiv:2402.03300, equation 4).
    """
    difference = other_log_probs - log_probs
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # Only large differences are clamped: their exponential would overflow. For very negative
        # differences the exponential vanishes, and the linear term keeps the gradient.
        difference = difference.clamp(max=MAX_LOG_RATIO)
        return difference.expm1() - difference
    raise ValueError(f"estimator must be one of {list(get_args(KLEstimator))}, got {estimator!r}.")


def masked_kl(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, mask: torch.Tensor, estimator: KLEstimator = "k1"
) -> torch.Tensor:
    """Return `kl_estimate` where the mask is true and 0 elsewhere, even if inputs are NaN there; all `[num_tokens]`."""
    return torch.where(mask.bool(), kl_estimate(log_probs, other_log_probs, estimator), 0.0)


def k3_kl_token_estimate(target_log_prob: torch.Tensor, log_prob: torch.Tensor) -> torch.Tensor:
    """Return `kl_estimate(log_prob, target_log_prob, "k3")` in TorchRL's order; raises ValueError if shapes differ."""
    if target_log_prob.shape != log_prob.shape:
        shapes = f"{list(target_log_prob.shape)} and {list(log_prob.shape)}"
        raise ValueError(f"target_log_prob and log_prob must have the same shape, got {shapes}.")
    return kl_estimate(log_prob, target_log_prob, "k3")


def kl_term(
    log_probs: torch.Tensor, other_log_probs: torch.Tensor, estimator: KLEstimator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `kl_estimate` and a mask of `k3` estimates with log-ratios beyond `MAX_LOG_RATIO`, both `[num_tokens]`."""
    is_clamped = torch.zeros_like(log_probs, dtype=torch.bool)
    if estimator == "k3":  # the only estimator with an exponential
        is_clamped = is_out_of_range((other_log_probs - log_probs).detach())
    return kl_estimate(log_probs, other_log_probs, estimator), is_clamped
