"""Importance ratios in log space, and the weights that correct for off-policy samples."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch

ImportanceLevel = Literal["token", "sequence", "geometric"]
ImportanceMode = Literal["truncate", "mask"]
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this value before an exponential, which overflows in float32 at 88."""


def is_out_of_range(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return whether `bounded_exp` clamps each log-ratio."""
    return log_ratio.abs() > MAX_LOG_RATIO


def bounded_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return `exp(log_ratio)`, with log-ratios clamped to `MAX_LOG_RATIO` in magnitude; these have no gradient."""
    # A single log-ratio of hundreds of nats would make the loss and the gradient infinite or NaN.
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_log_ratio(log_probs: torch.Tensor, old_log_probs: torch.Tensor) -> torch.Tensor:
    """Return `log pi(o_t) - log pi_old(o_t)` of each token (GRPO, arXiv:2402.03300, equation 3)."""
    return log_probs - old_log_probs


def sequence_log_ratio(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, sequence_index: torch.Tensor
) -> torch.Tensor:
    """Return the length-normalized sequence log-ratio, `[num_tokens]` (GSPO, arXiv:2507.18071, equations 7 and 14).

    `sequence_index` is `[num_tokens]` int64; all tokens of each sequence are required.

    Example:
        >>> sequence_log_ratio(torch.tensor([1.0, 3.0, 5.0]), torch.zeros(3), torch.tensor([0, 0, 1]))
        tensor([2., 2., 5.])
    """
    # The value is the sequence's mean, the gradient that of the token's own log-prob. Averaged over
    # each sequence, this is GSPO's gradient (equation 10).
    difference = (log_probs - old_log_probs).detach()
    return sequence_totals(difference, sequence_index, is_mean=True) + (log_probs - log_probs.detach())


def sequence_totals(values: torch.Tensor, sequence_index: torch.Tensor, *, is_mean: bool = False) -> torch.Tensor:
    """Return the sum, or the mean, over each token's sequence, `[num_tokens]`; differentiable."""
    if not values.numel():
        return values
    _, index, counts = sequence_index.unique(return_inverse=True, return_counts=True)
    sums = values.new_zeros(counts.shape[0]).index_add(0, index, values)
    return (sums / counts if is_mean else sums)[index]


@dataclass(frozen=True, slots=True)
class ImportanceBound:
    """Bounds of the importance weights `pi_old / pi_sampler`, for samples from an engine or an older policy.

    `w` is the ratio of a token, of its sequence (the product), or the geometric mean over its sequence:

    - `truncate`: `min(w, cap)` (Ionides, 2008, Journal of Computational and Graphical Statistics
      17(2), equation 3; for numerical differences between engines: Yao et al., 2025, "Your
      efficient RL framework secretly brings you off-policy RL training"). For stale samples it is
      the behaviour ratio of decoupled PPO (AReaL, arXiv:2505.24298, equation 5).
    - `mask`: `w` within `[floor, cap]`, otherwise 0 (IcePop, in Ring-1T, arXiv:2510.18855; for
      sequences: Liu et al., 2025, "When speed kills stability").

    Example:
        >>> bound = ImportanceBound(2.0, floor=0.5, mode="mask")
        >>> bound.bounded(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0., 1., 0.])
    """

    cap: float
    _: KW_ONLY
    floor: float = 0.0
    """Lower bound, only for `mask`."""
    mode: ImportanceMode = "truncate"
    level: ImportanceLevel = "token"
    """`token`, `sequence` or `geometric`."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("level", self.level, get_args(ImportanceLevel)),
            ("mode", self.mode, get_args(ImportanceMode)),
        ):
            if value not in choices:
                raise ValueError(f"importance {name} must be one of {list(choices)}, got {value!r}.")
        if not 0 <= self.floor < self.cap:
            raise ValueError(
                f"importance bounds must have 0 <= floor < cap, got floor={self.floor} and cap={self.cap}."
            )
        if self.floor and self.mode == "truncate":
            raise ValueError(f"importance floor={self.floor} has no meaning with mode 'truncate'; use mode 'mask'.")

    def log_weights(
        self, old_log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, sequence_index: torch.Tensor
    ) -> torch.Tensor:
        """Return the logarithms of the unbounded weights, `[num_tokens]`, detached."""
        log_weight = (old_log_probs - sampler_log_probs).detach()
        if self.level == "token":
            return log_weight
        return sequence_totals(log_weight, sequence_index, is_mean=self.level == "geometric")

    def bounded(self, log_weight: torch.Tensor) -> torch.Tensor:
        """Return the bounded weights; log-weights are clamped as in `bounded_exp`."""
        weight = bounded_exp(log_weight)
        if self.mode == "truncate":
            return weight.clamp(max=self.cap)
        return weight * ((weight >= self.floor) & (weight <= self.cap))


def importance_weights(
    old_log_probs: torch.Tensor,
    sampler_log_probs: torch.Tensor,
    sequence_index: torch.Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    level: ImportanceLevel = "token",
    mode: ImportanceMode = "truncate",
) -> torch.Tensor:
    """Return `pi_old / pi_sampler` of each token, bounded as by `ImportanceBound` and detached.

    All tensors are `[num_tokens]`. For levels other than `token` they must include all tokens of each sequence.

    Example:
        >>> old, sampler = torch.zeros(3), torch.tensor([-1.0, 1.0, 0.0])
        >>> importance_weights(old, sampler, torch.zeros(3, dtype=torch.int64), cap=2.0)
        tensor([2.0000, 0.3679, 1.0000])
    """
    bound = ImportanceBound(cap, floor=floor, mode=mode, level=level)
    return bound.bounded(bound.log_weights(old_log_probs, sampler_log_probs, sequence_index))


def effective_sample_size(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return `(sum w)^2 / (n sum w^2)` for `w = exp(log_ratio)` (Kong, 1992): 1 if all are equal, NaN if empty."""
    if not log_ratio.numel():
        return log_ratio.new_tensor(float("nan"))
    return (2 * log_ratio.logsumexp(0) - (2 * log_ratio).logsumexp(0)).exp() / log_ratio.numel()
