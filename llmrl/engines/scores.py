"""Scoring of given tokens, for engines that serve as teachers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from llmrl._utils.arguments import check_least
from llmrl.engines.base import EngineError, SamplingConfig, completion_budget
from llmrl.engines.completion_checks import IMPOSSIBLE_LOG_PROB, LARGEST_LOG_PROB


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probs of given tokens, at temperature 1 over the whole vocabulary."""

    log_probs: torch.Tensor
    """`[num_tokens]` float32: log-prob of each token given those before it; 0 for the first."""
    top_ids: torch.Tensor
    """`[num_tokens, top_k]` int64: the likeliest ids at each position, in descending order; -1 at the first."""
    top_log_probs: torch.Tensor
    """`[num_tokens, top_k]` float32: log-probs of `top_ids`."""


@runtime_checkable
class ScoresTokens(Protocol):
    """An engine that scores given tokens."""

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return the log-prob of each of `[num_tokens]` tokens, and the `top_k` likeliest ids at each position.

        Raises ValueError if there are fewer than two tokens, no room for one more, or `top_k` is
        not allowed, and EngineError if the engine died, refused, or returned an incomplete answer.
        """


def check_scored(token_ids: Sequence[int], top_k: int, max_model_len: int) -> None:
    """Raise ValueError for too few or too many tokens, or a negative `top_k`."""
    if len(token_ids) < 2:
        raise ValueError(
            f"token_ids must have at least two tokens, since nothing predicts the first; got {len(token_ids)}."
        )
    check_least(0, top_k=top_k)
    completion_budget(len(token_ids), SamplingConfig(max_new_tokens=1), max_model_len)


def read_scores(
    token_ids: Sequence[int], reported_ids: torch.Tensor, reported: torch.Tensor, *, engine: str
) -> TokenScores:
    """Return token scores from the log-probs that an engine reports for all tokens except the first.

    Args:
        token_ids: `[num_tokens]` requested tokens.
        reported_ids, reported: `[num_tokens - 1, 1 + top_k]` ids and log-probs: the token's own, then the likeliest.
        engine: name of the engine in errors.

    Raises EngineError if the engine scored other tokens or returned invalid log-probs.

    Example:
        >>> ids, log_probs = torch.tensor([[7, 5]]), torch.tensor([[-2.0, -0.5]])
        >>> scores = read_scores([3, 7], ids, log_probs, engine="The engine")
        >>> scores.log_probs.tolist(), scores.top_ids.tolist()
        ([0.0, -2.0], [[-1], [5]])
    """
    if reported_ids[:, 0].tolist() != list(token_ids[1:]):
        raise EngineError(f"{engine} scored other tokens than the requested ones.")
    if not bool((reported <= LARGEST_LOG_PROB).all()):  # also refuses NaN
        raise EngineError(
            f"{engine} returned log-probs up to {float(reported.max())}; numbers up to 0 are expected. Start a server "
            "with log-probs, not logits (vllm serve --logprobs-mode)."
        )
    first = torch.zeros(1, reported.shape[1])
    columns = torch.cat([first, reported.float().clamp(min=IMPOSSIBLE_LOG_PROB, max=0.0)])
    return TokenScores(columns[:, 0], torch.cat([first.long() - 1, reported_ids])[:, 1:], columns[:, 1:])
