"""Sampling masks of rows: the ids that truncation or a grammar kept when each token was sampled."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from llmrl.data.tensordicts import batch_elements, tensordict_of

SAMPLING_MASK_KEY = "sampling_mask"


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """Ids that top-k, top-p, min-p or a grammar kept for each of several tokens, concatenated.

    The ids listed for a token are the kept ones or, if most ids were kept, the removed ones, each as `~id`.

    The log-probs of a truncated distribution are recomputed by normalising over the kept ids ("Keep Sampling Mask" of
    DeepSeek-V3.2, arXiv:2512.02556, section 3.1). Raises ValueError if the counts do not add up to the number of ids.

    Example:
        >>> from array import array
        >>> mask = SamplingMask.of([None, array("i", [4, 9])])
        >>> mask.token_ids.tolist(), mask.counts.tolist()
        ([4, 9], [0, 2])
    """

    token_ids: torch.Tensor
    """[num_listed] int32: kept ids of all tokens, or `~id` of removed ids."""
    counts: torch.Tensor
    """[num_tokens] int32: number of listed ids of each token; 0 if nothing was cut."""

    def __post_init__(self) -> None:
        if int(self.counts.sum()) != len(self.token_ids):
            raise ValueError(
                f"A sampling mask's counts add up to {int(self.counts.sum())}, and it has {len(self.token_ids)} ids: "
                "rows with a sampling mask must be neither cut nor padded; keep the batch lazily stacked."
            )

    @classmethod
    def of(cls, kept: Sequence[array[int] | None]) -> SamplingMask:
        """Return the mask of `[num_tokens]` tokens from their listed ids, None for a token without a cut."""
        joined = array("i")
        for ids in kept:
            if ids is not None:
                joined.extend(ids)
        counts = [0 if ids is None else len(ids) for ids in kept]
        return cls(torch.tensor(joined, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))

    @classmethod
    def joined(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Concatenate masks."""
        return cls(torch.cat([mask.token_ids for mask in masks]), torch.cat([mask.counts for mask in masks]))

    @classmethod
    def nothing_cut(cls, num_tokens: int) -> SamplingMask:
        """Return the mask of tokens that were sampled from all ids."""
        return cls(torch.zeros(0, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int32))

    def chosen(self, index: torch.Tensor) -> SamplingMask:
        """Return the mask of the tokens at `index`, `[num_chosen]` positions in `counts`, in that order."""
        counts = self.counts[index].long()
        starts = (self.counts.long().cumsum(0) - self.counts)[index]
        first = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum()), device=counts.device) + (starts - first).repeat_interleave(counts)
        return SamplingMask(self.token_ids[places], self.counts[index])

    def lists_removed(self) -> torch.Tensor:
        """Return whether the removed ids are listed for each token, `[num_tokens]` bool."""
        ends = self.counts.long().cumsum(0)
        is_listed = self.counts > 0
        is_listed[is_listed.clone()] = self.token_ids[ends[is_listed] - 1] < 0
        return is_listed

    def to(self, device: torch.device | str | None) -> SamplingMask:
        """Return the mask on a device."""
        return SamplingMask(self.token_ids.to(device), self.counts.to(device))


def sampling_mask_entry(kept: Sequence[array[int] | None]) -> dict[str, TensorDictBase]:
    """Return the entry of a row or a turn by its key; empty if nothing was cut."""
    if kept.count(None) == len(kept):  # fast, since this is checked at every turn for all tokens
        return {}
    mask = SamplingMask.of(kept)
    return {SAMPLING_MASK_KEY: tensordict_of({"token_ids": mask.token_ids, "counts": mask.counts})}


def read_sampling_masks(batch: TensorDictBase, lengths: Sequence[int]) -> SamplingMask | None:
    """Return the concatenated mask of all rows of a batch with one batch dimension; None if no row has one.

    Rows without the entry were sampled from all ids. `lengths`: number of tokens of each row.
    Raises ValueError if a row's mask does not have one count per token, or its ids are incomplete.
    """
    entries = [element.get(SAMPLING_MASK_KEY, None) for element in batch_elements(batch)]
    if all(entry is None for entry in entries):
        return None
    masks = []
    for row, (entry, length) in enumerate(zip(entries, lengths, strict=True)):
        if entry is None:
            masks.append(SamplingMask.nothing_cut(length))
            continue
        counts = entry.get("counts")
        if len(counts) != length:
            raise ValueError(
                f"{(SAMPLING_MASK_KEY, 'counts')!r} of row {row} has {len(counts)} entries for {length} tokens: rows "
                "with a sampling mask must be neither cut nor padded; keep the batch lazily stacked."
            )
        masks.append(SamplingMask(entry.get("token_ids"), counts))
    return SamplingMask.joined(masks)
