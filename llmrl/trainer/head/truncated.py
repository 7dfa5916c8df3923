"""Log-probs under a truncated distribution, normalised over the ids that a sampling mask keeps.

With `l` the log-probs over all ids, the log-prob of token `t` among the kept ids `K` is
`l_t - logsumexp_{j in K} l_j`, so `chunked_log_probs` scores all kept ids of a position as targets. Where most ids are
kept (inside a JSON string), the mask lists the removed ids instead, and these are excluded from the logits.
"""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from llmrl.data.sampling_mask import SamplingMask
from llmrl.trainer.head.log_probs import MIN_LOG_PROB, LogitTransform, Removed, chunked_log_probs

_NOT_THEIRS = "A sampling mask must keep each sampled token once: this mask belongs to other tokens."


class HeadOptions(TypedDict, total=False):
    """Further arguments of `chunked_log_probs`."""

    bias: torch.Tensor | None
    transform: LogitTransform | None
    chunk_size: int | None
    return_entropy: bool


def truncated_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    sampling_mask: SamplingMask,
    positions: torch.Tensor,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return each target's log-prob within the kept ids, and the entropy if requested; both are differentiable.

    Args:
        hidden, weight, targets, options: see `chunked_log_probs`.
        sampling_mask: kept ids of each target; a target without any is scored over all ids.
        positions: `[num_scored]` ascending indices into `hidden`.

    Raises ValueError if a target is not exactly once among its kept ids.

    Example:
        >>> hidden, weight = torch.zeros(1, 3), torch.eye(3)
        >>> mask = SamplingMask(torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2]))
        >>> target = torch.tensor([2])
        >>> truncated_log_probs(hidden, weight, target, sampling_mask=mask, positions=torch.tensor([0]))[0].exp()
        tensor([0.5000])
    """
    is_listed = sampling_mask.lists_removed()
    if not is_listed.any():
        return _among_kept(hidden, weight, targets, sampling_mask, positions, **options)
    # Tokens that share a position may have different masks, so each token with removed ids gets its own position.
    of_listed = is_listed.nonzero()[:, 0]
    of_others = (~is_listed).nonzero()[:, 0]
    listed = sampling_mask.chosen(of_listed)
    owner = torch.arange(len(of_listed), device=targets.device).repeat_interleave(listed.counts.long())
    removed = Removed(owner, ~listed.token_ids.long())
    if bool((removed.token_ids == targets[of_listed][owner]).any()):
        raise ValueError(_NOT_THEIRS)
    states = hidden[positions[of_listed]]
    scored = [chunked_log_probs(states, weight, targets[of_listed], removed=removed, **options)]
    if len(of_others):
        others = sampling_mask.chosen(of_others)
        scored.append(_among_kept(hidden, weight, targets[of_others], others, positions[of_others], **options))
    order = torch.cat([of_listed, of_others]).argsort()
    log_probs, entropies = zip(*scored, strict=True)
    return torch.cat(log_probs)[order], torch.cat(entropies)[order] if options.get("return_entropy") else None


def _among_kept(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    sampling_mask: SamplingMask,
    positions: torch.Tensor,
    **options: Unpack[HeadOptions],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    is_cut = sampling_mask.counts > 0
    counts = sampling_mask.counts.long().clamp(min=1)  # without truncation, the target alone
    owner = torch.arange(len(targets), device=targets.device).repeat_interleave(counts)
    kept_ids = targets[owner]
    is_of_cut = is_cut[owner]
    kept_ids[is_of_cut] = sampling_mask.token_ids.long()
    is_target = ~is_of_cut | (kept_ids == targets[owner])
    if int(is_target.sum()) != len(targets):
        raise ValueError(_NOT_THEIRS)
    kept, entropy = chunked_log_probs(hidden, weight, kept_ids, positions=positions[owner], **options)
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
    is_listed = sampling_mask.lists_removed()
    is_kept = ((sampling_mask.counts == 0) | is_listed)[:, None].expand_as(logits).clone()
    ids = sampling_mask.token_ids.long()
    is_kept[owner, torch.where(ids < 0, ~ids, ids)] = ids >= 0
    return logits.masked_fill(~is_kept, MIN_LOG_PROB)
