"""Importance ratios, in logs."""

from __future__ import annotations

import torch


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """`log pi(o_t) - log pi_old(o_t)` of each token (GRPO, arXiv:2402.03300, equation 3).

    Example:
        >>> token_log_ratio(torch.tensor([-1.0]), torch.tensor([-1.5]))
        tensor([0.5000])
    """
    return log_probs - old_log_probs


def sequence_log_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, sequence_index: torch.Tensor
) -> torch.Tensor:
    """The length-normalized sequence ratio, one entry a token (GSPO, arXiv:2507.18071, equations 7 and 14).

    Its value at every token is the mean log-ratio of the sequence; its gradient is that of the token's own log-prob,
    so that with the mean over each sequence the gradient is GSPO's (equation 10).

    Args:
        log_probs, old_log_probs: `[num_tokens]`.
        sequence_index: `[num_tokens]` int64; all tokens of a sequence must be here.

    Example:
        >>> zeros = torch.zeros(3)
        >>> sequence_log_ratio(torch.tensor([1.0, 3.0, 5.0]), zeros, torch.tensor([0, 0, 1]))
        tensor([2., 2., 5.])
    """
    if not log_probs.numel():
        return log_probs - old_log_probs
    difference = (log_probs - old_log_probs).detach()
    sums = difference.new_zeros(int(sequence_index.max()) + 1).index_add_(0, sequence_index, difference)
    counts = torch.bincount(sequence_index, minlength=sums.shape[0]).clamp(min=1)
    return (sums / counts)[sequence_index] + (log_probs - log_probs.detach())


def truncated_importance(old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, cap: float) -> torch.Tensor:
    """`min(pi_old / pi_sampler, cap)`: what the trainer makes of samples that another engine drew.

    Truncated importance sampling: Ionides (2008), Journal of Computational and Graphical Statistics 17(2), equation 3;
    for a sampler that differs from the trainer by arithmetic: Yao et al. (2025), "Your efficient RL framework secretly
    brings you off-policy RL training". No gradient flows through it.

    Raises:
        ValueError: when `cap` is not positive.
    """
    if not cap > 0:
        raise ValueError(f"cap must be positive, got {cap}.")
    return (old_log_probs - sampler_log_probs).detach().exp().clamp(max=cap)


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """`(sum w)^2 / (n sum w^2)` in (0, 1]: 1 when all weights are equal (Kong, 1992; NaN for no token).

    Example:
        >>> float(effective_sample_size(torch.zeros(4)))
        1.0
    """
    if not log_ratio.numel():
        return log_ratio.new_tensor(float("nan"))
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp() / log_ratio.numel()
