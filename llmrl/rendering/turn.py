"""A turn: what the engine was given and what it sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmrl.data.columns import check_per_token


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the engine and its answer, by token.

    Raises:
        ValueError: when log-probs or versions are missing or not one a completion token.

    Example:
        >>> Turn(prompt_ids=(1, 2), completion_ids=(3,), log_probs=(-0.1,), versions=(0,)).full_ids
        (1, 2, 3)
    """

    prompt_ids: Sequence[int]
    """[num_prompt_tokens] everything the engine was given."""
    completion_ids: Sequence[int]
    """[num_completion_tokens] everything it sampled."""
    log_probs: Sequence[float]
    """[num_completion_tokens] the sampler's log-probs."""
    versions: Sequence[int]
    """[num_completion_tokens] the policy version that sampled each token."""

    def __post_init__(self) -> None:
        check_per_token(self.completion_ids, log_probs=self.log_probs, versions=self.versions)

    @property
    def full_ids(self) -> tuple[int, ...]:
        """Prompt and completion, [num_prompt_tokens + num_completion_tokens]."""
        return (*self.prompt_ids, *self.completion_ids)
