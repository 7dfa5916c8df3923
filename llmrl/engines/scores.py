"""What a model makes of tokens that another one chose: how an engine serves as a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from llmrl.engines.base import EngineError, SamplingConfig, completion_budget

_IMPOSSIBLE = -9999.0
"""The log-prob of what a model excludes, as vLLM's server writes it: JSON has no infinity."""
_LARGEST_LOG_PROB = 1e-3
"""Rounding may lift one a little above 0."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of given tokens, at temperature 1 and over the whole vocabulary."""

    log_probs: torch.Tensor
    """`[num_tokens]` float32, of each token after those before it; 0 of the first, which nothing predicts."""
    top_ids: torch.Tensor
    """`[num_tokens, top_k]` int64: the likeliest ids in each token's place, likeliest first; -1 in the first's."""
    top_log_probs: torch.Tensor
    """`[num_tokens, top_k]` float32: theirs."""


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that scores tokens which it did not sample."""

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return the log-prob of each of `[num_tokens]` tokens, and the `top_k` likeliest ids in its place.

        Raises ValueError for fewer than two tokens, more than fit with one besides, or a `top_k` that is not allowed,
        and EngineError if the engine died, refused, or answered with less than that.
        """
        ...


def check_scored(token_ids: Sequence[int], top_k: int, max_model_len: int) -> None:
    """Refuse what no engine can score.

    Raises ValueError for fewer than two tokens, more than fit with one besides, or a negative `top_k`.
    """
    if len(token_ids) < 2:
        raise ValueError(f"token_ids must be two or more, for nothing predicts the first; got {len(token_ids)}.")
    if top_k < 0:
        raise ValueError(f"top_k must be at least 0, got {top_k}.")
    completion_budget(len(token_ids), SamplingConfig(max_new_tokens=1), max_model_len)


def read_scores(
    token_ids: Sequence[int], reported_ids: torch.Tensor, reported: torch.Tensor, *, engine: str
) -> TokenScores:
    """Return the scores of tokens from what an engine reports of each but the first.

    Args:
        token_ids: `[num_tokens]` that were asked for.
        reported_ids, reported: `[num_tokens - 1, 1 + top_k]` ids and log-probs: the token's own, then the likeliest.
        engine: as errors name it.

    Raises EngineError if the tokens are others, or a log-prob is none.

    Example:
        >>> ids, log_probs = torch.tensor([[7, 5]]), torch.tensor([[-2.0, -0.5]])
        >>> scores = read_scores([3, 7], ids, log_probs, engine="The engine")
        >>> scores.log_probs.tolist(), scores.top_ids.tolist()
        ([0.0, -2.0], [[-1], [5]])
    """
    if reported_ids[:, 0].tolist() != list(token_ids[1:]):
        raise EngineError(f"{engine} scored other tokens than it was given.")
    if not bool((reported <= _LARGEST_LOG_PROB).all()):  # nor is NaN
        raise EngineError(
            f"{engine} returned log-probs up to {float(reported.max())}; numbers up to 0 are expected. Start a server "
            "with log-probs, not logits (vllm serve --logprobs-mode)."
        )
    first = torch.zeros(1, reported.shape[1])
    columns = torch.cat([first, reported.float().clamp(min=_IMPOSSIBLE, max=0.0)])
    return TokenScores(columns[:, 0], torch.cat([first.long() - 1, reported_ids])[:, 1:], columns[:, 1:])
