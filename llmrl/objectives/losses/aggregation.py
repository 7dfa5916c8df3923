"""Aggregation weights per token of the whole batch; micro-batches add up to exactly the batch's loss."""

from __future__ import annotations

from typing import Literal, get_args

import torch

Aggregation = Literal[
    "token_mean", "sequence_mean", "prompt_mean", "group_mean", "fixed_length", "sequence_sum", "none"
]


def aggregation_weights(
    sequence_index: torch.Tensor,
    num_sequences: int,
    aggregation: Aggregation = "token_mean",
    *,
    fixed_length: int | None = None,
    group_of_sequence: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weight of each trained token; the loss is the weighted sum of token losses.

    - `token_mean`: `1 / num_tokens` (DAPO, arXiv:2503.14476, equation 8);
    - `sequence_mean`: `1 / (num_sequences * length)` (GRPO, arXiv:2402.03300, equation 3), TorchRL's `prompt_mean`;
    - `group_mean`: `1 / (num_groups * tokens of the group)` (ScaleRL's prompt average, arXiv:2510.13786, section 3.2);
    - `fixed_length`: `1 / (num_sequences * fixed_length)` (Dr. GRPO, arXiv:2503.20783, section 3.2 and listing 1);
    - `sequence_sum`: `1 / num_sequences`: a sequence is one action (RLOO, arXiv:2402.14740, equation 7);
    - `none`: 1, for a loss per token.

    Args:
        sequence_index: `[num_tokens]` int64: sequence (rollout) of each trained token, out of `num_sequences`.
        fixed_length: generation budget, required for `fixed_length`.
        group_of_sequence: `[num_sequences]` int64, for `group_mean`; by default each sequence is a group.

    Example:
        >>> aggregation_weights(torch.tensor([0, 0, 1]), 2, "sequence_mean")
        tensor([0.2500, 0.2500, 0.5000])
    """
    num_tokens = sequence_index.shape[0]
    weights = torch.ones(num_tokens, device=sequence_index.device)
    if aggregation == "none" or not num_tokens:
        return weights
    if aggregation == "token_mean":
        return weights / num_tokens
    if aggregation in ("sequence_mean", "prompt_mean"):
        lengths = torch.bincount(sequence_index, minlength=num_sequences)
        return 1.0 / (num_sequences * lengths[sequence_index])
    if aggregation == "group_mean":
        if group_of_sequence is None:
            group_of_sequence = torch.arange(num_sequences, device=sequence_index.device)
        groups = group_of_sequence[sequence_index]
        return 1.0 / (len(group_of_sequence.unique()) * torch.bincount(groups)[groups])
    if aggregation == "fixed_length":
        if fixed_length is None or fixed_length < 1:
            raise ValueError(f"aggregation='fixed_length' needs fixed_length of at least 1, got {fixed_length!r}.")
        return weights / (num_sequences * fixed_length)
    if aggregation == "sequence_sum":
        return weights / num_sequences
    raise ValueError(f"aggregation must be one of {list(get_args(Aggregation))}, got {aggregation!r}.")
