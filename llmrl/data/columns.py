"""Per-token columns of a sequence that is being built."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

CONTEXT_VERSION = -1
"""Policy version of a token that no policy sampled."""


class TokenColumns:
    """Per-token columns of one growing sequence, all of the same length; lists, since they are cheap to extend.

    Example:
        >>> columns = TokenColumns()
        >>> columns.append_context([1, 2])
        >>> columns.append_completion([3], log_probs=[-0.5], versions=[0])
        >>> columns.token_ids, columns.loss_mask, columns.log_probs, columns.versions
        ([1, 2, 3], [False, False, True], [0.0, 0.0, -0.5], [-1, -1, 0])
    """

    __slots__ = ("log_probs", "loss_mask", "routed_experts", "sampling_mask", "token_ids", "versions")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        """[num_tokens] ids of the tokens that the engine read or sampled."""
        self.loss_mask: list[bool] = []
        """[num_tokens] whether the policy sampled the token, so that it is trained on."""
        self.log_probs: list[float] = []
        """[num_tokens] log-prob of the sampler; 0 outside the mask."""
        self.versions: list[int] = []
        """[num_tokens] policy version that sampled the token; -1 outside the mask."""
        self.sampling_mask: list[array[int] | None] = []
        """[num_tokens] ids that truncation kept when the token was sampled; None if it kept all."""
        self.routed_experts: list[np.ndarray | None] = []
        """[num_tokens] arrays `[num_layers, top_k]`: the experts that computed the previous token, and so this token's
        log-prob. None at the first token, and if the engine did not report them."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not trained on: prompts, template text, environment messages."""
        count = len(token_ids)
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([False] * count)
        self.log_probs.extend([0.0] * count)
        self.versions.extend([CONTEXT_VERSION] * count)
        self.sampling_mask.extend([None] * count)
        self.routed_experts.extend([None] * count)

    def append_completion(
        self,
        token_ids: Sequence[int],
        *,
        log_probs: Sequence[float] | None,
        versions: Sequence[int] | None,
        sampling_mask: Sequence[array[int] | None] | None = None,
        routed_experts: np.ndarray | None = None,
    ) -> None:
        """Append sampled tokens; ValueError if a column is missing or does not have one value per token.

        `routed_experts`, `[num_tokens - 1, num_layers, top_k]`, covers all tokens of the sequence
        but the last. Tokens that already have experts keep them.
        """
        if sampling_mask is None:
            sampling_mask = [None] * len(token_ids)
        check_per_token(token_ids, log_probs=log_probs, versions=versions, sampling_mask=sampling_mask)
        assert log_probs is not None and versions is not None
        self.token_ids.extend(token_ids)
        self.loss_mask.extend([True] * len(token_ids))
        self.log_probs.extend(log_probs)
        self.versions.extend(versions)
        self.sampling_mask.extend(sampling_mask)
        self.routed_experts.extend([None] * len(token_ids))
        if routed_experts is not None:
            if len(routed_experts) != len(self) - 1:
                raise ValueError(
                    f"routed_experts must have entries for {len(self) - 1} tokens, got {len(routed_experts)}."
                )
            start = len(self)
            while start > 1 and self.routed_experts[start - 1] is None:
                start -= 1
            # A copy of the new part: a view would keep the whole request's array, with earlier turns, in memory.
            self.routed_experts[start:] = list(routed_experts[start - 1 :].copy())

    def extend(self, columns: TokenColumns) -> None:
        """Append the tokens of other columns unchanged."""
        self.token_ids += columns.token_ids
        self.loss_mask += columns.loss_mask
        self.log_probs += columns.log_probs
        self.versions += columns.versions
        self.sampling_mask += columns.sampling_mask
        self.routed_experts += columns.routed_experts

    def mark_context(self, start: int, stop: int) -> None:
        """Exclude tokens `start` to `stop` from training; ValueError if they are not a range of the sequence."""
        if not 0 <= start <= stop <= len(self.token_ids):
            raise ValueError(f"start and stop must lie in order in 0..{len(self.token_ids)}, got {start} and {stop}.")
        count = stop - start
        self.loss_mask[start:stop] = [False] * count
        self.log_probs[start:stop] = [0.0] * count
        self.versions[start:stop] = [CONTEXT_VERSION] * count
        self.sampling_mask[start:stop] = [None] * count

    def copy(self, stop: int | None = None, *, start: int = 0) -> TokenColumns:
        """Return an independent copy of tokens `start` to `stop` (by default all)."""
        columns = TokenColumns()
        columns.token_ids = self.token_ids[start:stop]
        columns.loss_mask = self.loss_mask[start:stop]
        columns.log_probs = self.log_probs[start:stop]
        columns.versions = self.versions[start:stop]
        columns.sampling_mask = self.sampling_mask[start:stop]
        columns.routed_experts = self.routed_experts[start:stop]
        return columns


def check_per_token(token_ids: Sequence[int], **columns: Sequence[object] | None) -> None:
    """Raise ValueError if a column of sampled tokens is missing or does not have one value per token."""
    for name, column in columns.items():
        if column is None:
            raise ValueError(
                f"{name} is missing for {len(token_ids)} sampled tokens; ask the engine for one value per token."
            )
        if len(column) != len(token_ids):
            raise ValueError(f"{name} must have one value per sampled token ({len(token_ids)}), got {len(column)}.")
