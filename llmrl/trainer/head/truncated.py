"""Log-probs under a truncated distribution, normalised over the ids kept by top-k, top-p or min-p.

With `l` the log-probs over all ids, the log-prob of token `t` among the kept ids `K` is
`l_t - logsumexp_{j in K} l_j`, so `chunked_log_probs` scores all kept ids of a position as targets.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from llmrl.data.sampling_mask import SamplingMask
from llmrl.trainer.head.log_probs import MIN_LOG_PROB, LogitTransform, chunked_log_probs


class HeadOptions(TypedDict, total=False):
    """Further arguments of `chunked_log_probs`."""

    bias: torch.Tensor | None
    transform: LogitTransform | None
    chunk_size: int | None


def truncated_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    sampling_mask: SamplingMask,
    positions: torch.Tensor,
    return_entropy: bool = False,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each target's log-prob within the kept ids, and the entropy of that distribution if asked; differentiable.

    Args:
        hidden, weight, targets, options: see `chunked_log_probs`.
        sampling_mask: kept ids of each target; a target without any is scored over all ids.
        positions: `[num_scored]` ascending indices into `hidden`.

    Raises:
        ValueError: if a target is not exactly once among its kept ids.

    Example:
        >>> hidden, weight = torch.zeros(1, 3), torch.eye(3)
        >>> mask = SamplingMask(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2]))
        >>> target = torch.tensor([2])
        >>> truncated_log_probs(hidden, weight, target, sampling_mask=mask, positions=torch.tensor([0]))[0].exp()
        tensor([0.5000])
    """
    is_cut = sampling_mask.counts > 0
    counts = sampling_mask.counts.long().clamp(min=1)  # without truncation, the target alone
    owner = torch.arange(len(targets), device=targets.device).repeat_interleave(counts)
    kept_ids = targets[owner]
    is_of_cut = is_cut[owner]
    kept_ids[is_of_cut] = sampling_mask.token_ids.long()
    is_target = ~is_of_cut | (kept_ids == targets[owner])
    if int(is_target.sum()) != len(targets):
        raise ValueError("A sampling mask must keep each sampled token once: it is not that of these tokens.")
    kept, entropy = chunked_log_probs(
        hidden, weight, kept_ids, positions=positions[owner], return_entropy=return_entropy, **options
    )
    largest = torch.full_like(targets, -torch.inf, dtype=kept.dtype).scatter_reduce(0, owner, kept.detach(), "amax")
    sums = torch.zeros_like(largest).index_add(0, owner, (kept - largest[owner]).exp())
    normalizer = largest + sums.log()
    log_probs = torch.where(is_cut, kept[is_target] - normalizer, kept[is_target])
    if entropy is None:
        return log_probs, None
    within = (kept - normalizer[owner]).clamp(min=MIN_LOG_PROB)
    entropy_within = torch.zeros_like(largest).index_add(0, owner, -within.exp() * within)
    return log_probs, torch.where(is_cut, entropy_within, entropy[is_target])


def kept_logits(logits: torch.Tensor, sampling_mask: SamplingMask) -> torch.Tensor:
    """Return logits `[num_scored, vocab_size]` with no probability for ids that truncation removed."""
    owner = torch.arange(len(logits), device=logits.device).repeat_interleave(sampling_mask.counts.long())
    is_kept = (sampling_mask.counts == 0)[:, None].expand_as(logits).clone()
    is_kept[owner, sampling_mask.token_ids.long()] = True
    return logits.masked_fill(~is_kept, MIN_LOG_PROB)
