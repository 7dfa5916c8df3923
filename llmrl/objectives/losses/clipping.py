"""Per-token policy losses that bound the importance ratio; log-ratios are clamped as in `bounded_exp`."""

from __future__ import annotations

import math
from typing import Literal

import torch

from llmrl.objectives.ratios import bounded_exp

BinaryDivergence = Literal["tv", "kl"]
_SMALLEST = 1e-12


def clip_bounds(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    """Return `(epsilon_low, epsilon_high)` from one or two numbers; raise ValueError if they are out of range."""
    low, high = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
    if not 0 <= low <= 1 or not high >= 0:
        raise ValueError(
            f"clip_epsilon must be a low bound in [0, 1] and a high bound of at least 0, got {(low, high)}."
        )
    return float(low), float(high)


def clipped_log_ratio(log_ratio: torch.Tensor, epsilon_low: float, epsilon_high: float) -> torch.Tensor:
    """Return `log clip(ratio, 1 - epsilon_low, 1 + epsilon_high)`; an `epsilon_low` of 1 means no lower bound."""
    lowest = math.log1p(-epsilon_low) if epsilon_low < 1 else -math.inf
    return log_ratio.clamp(lowest, math.log1p(epsilon_high))


def clipped_surrogate(
    log_ratio: torch.Tensor,
    advantage: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    dual_clip: float | None = None,
) -> torch.Tensor:
    """Return `-min(r A, clip(r) A)` per token (GRPO, arXiv:2402.03300, equation 3).

    With different bounds it is Clip-Higher (DAPO, arXiv:2503.14476, equation 10). For negative advantages `dual_clip`,
    `c`, bounds the objective from below by `c A` (dual-clip PPO, arXiv:1912.09729, equation 5).

    Example:
        >>> clipped_surrogate(torch.tensor([0.0, 1.0]), torch.ones(2), 0.2, 0.2)
        tensor([-1.0000, -1.2000])
    """
    clipped = clipped_log_ratio(log_ratio, epsilon_low, epsilon_high)
    objective = torch.minimum(bounded_exp(log_ratio) * advantage, bounded_exp(clipped) * advantage)
    if dual_clip is not None:
        objective = torch.where(advantage < 0, torch.maximum(objective, dual_clip * advantage), objective)
    return -objective


def is_within_trust_region(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    max_divergence: float,
    divergence: BinaryDivergence = "tv",
) -> torch.Tensor:
    """Return which tokens an update may move (DPPO, arXiv:2602.04879), `[num_tokens]` bool.

    The divergence is that of the binary distributions "this token or another" with probabilities `mu` (old) and `pi`:
    `|mu - pi|` (`tv`), or `mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))` (`kl`). It is a lower bound of the
    divergence of the full distributions. A token beyond `max_divergence` is excluded only if its advantage moves it
    further away. `old_log_probs` are the sampler's; `max_divergence` is a probability for `tv`, and in nats for `kl`.

    Example:
        >>> old, new = torch.tensor([0.5, 0.001]).log(), torch.tensor([0.8, 0.003]).log()
        >>> is_within_trust_region(new, old, torch.ones(2), 0.2), is_within_trust_region(new, old, -torch.ones(2), 0.2)
        (tensor([False,  True]), tensor([True, True]))
    """
    current = log_probs.detach().double()
    old = old_log_probs.detach().double()
    pi = current.exp()
    mu = old.exp()
    if divergence == "tv":
        measured = (mu - pi).abs()
    else:
        # If the token has probability 1, the log-probability of all others is minus infinity.
        others = ((1 - mu).clamp(min=_SMALLEST).log() - (1 - pi).clamp(min=_SMALLEST).log()) * (1 - mu)
        measured = mu * (old - current) + others
    moves_away = torch.where(advantage > 0, pi > mu, pi < mu)
    return ~(moves_away & (measured > max_divergence))


def clipped_importance(
    log_ratio: torch.Tensor,
    log_probs: torch.Tensor,
    advantage: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
) -> torch.Tensor:
    """Return `-sg(clip(r)) A log pi` per token (CISPO, arXiv:2506.13585, equations 4 and 5)."""
    weight = bounded_exp(clipped_log_ratio(log_ratio, epsilon_low, epsilon_high).detach())
    return -weight * advantage * log_probs
