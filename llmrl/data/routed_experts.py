"""Routed experts of rows: which experts of a mixture the engine computed each token with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import torch
from tensordict import TensorDictBase

from llmrl.data.sampling_mask import SamplingMask, read_sampling_masks
from llmrl.data.tensordicts import batch_elements

if TYPE_CHECKING:
    import numpy as np

ROUTED_EXPERTS_KEY = "routed_experts"
UNKNOWN_EXPERT = -1
"""Stands for the experts of a token without known ones: the trainer's own router chooses them."""


class Replay(TypedDict, total=False):
    """What of the sampler's computation is made again when rows are scored; without an entry where no row has it."""

    sampling_mask: SamplingMask
    """[num_row_tokens]: what truncation kept."""
    routed_experts: list[torch.Tensor]
    """`[num_tokens, num_layers, top_k]` int16 a row: the experts."""


def read_replay(batch: TensorDictBase, lengths: Sequence[int]) -> Replay:
    """Return what a batch's rows say of how they were sampled.

    Args:
        batch: with one batch dimension; rows of one batch may have an entry or lack it.
        lengths: tokens of each row.

    Raises:
        ValueError: if an entry has not one value a token.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> row = TensorDict({"routed_experts": torch.tensor([[[0, 3]], [[1, 2]]], dtype=torch.int16)})
        >>> [experts.shape for experts in read_replay(lazy_stack([row]), [2])["routed_experts"]]
        [torch.Size([2, 1, 2])]
    """
    replay = Replay()
    if (sampling_mask := read_sampling_masks(batch, lengths)) is not None:
        replay["sampling_mask"] = sampling_mask
    entries = [element.get(ROUTED_EXPERTS_KEY, None) for element in batch_elements(batch)]
    given = next((entry for entry in entries if entry is not None), None)
    if given is not None:
        replay["routed_experts"] = [
            unknown_experts(length, given.shape[1:]) if entry is None else _checked(entry, row, length, given.shape[1:])
            for row, (entry, length) in enumerate(zip(entries, lengths, strict=True))
        ]
    return replay


def unknown_experts(num_tokens: int, shape: torch.Size) -> torch.Tensor:
    """Return the entry of tokens without known experts, `[num_tokens, num_layers, top_k]`."""
    return torch.full((num_tokens, *shape), UNKNOWN_EXPERT, dtype=torch.int16)


def _checked(entry: torch.Tensor, row: int, length: int, shape: torch.Size) -> torch.Tensor:
    if entry.ndim != 3 or entry.shape != (length, *shape) or entry.dtype != torch.int16:
        raise ValueError(
            f"{ROUTED_EXPERTS_KEY!r} of row {row} is {entry.dtype} of shape {tuple(entry.shape)} for {length} tokens; "
            "torch.int16 of shape [num_tokens, num_layers, top_k] is expected, alike in all rows, which must be "
            "neither cut nor padded: keep the batch lazily stacked."
        )
    return entry


def routed_experts_entry(before: Sequence[np.ndarray | None]) -> dict[str, torch.Tensor]:
    """Return the entry of a row or a turn, by its key; nothing where they are not known.

    Args:
        before: `[num_tokens]`, as `TokenColumns` has them: of each token the experts, `[num_layers, top_k]`, that made
            its log-prob, which are those that the token before it was computed with.

    Example:
        >>> import numpy as np
        >>> routed_experts_entry([None, np.array([[0, 3]]), None])["routed_experts"].tolist()
        [[[0, 3]], [[-1, -1]], [[-1, -1]]]
    """
    given = next((experts for experts in before if experts is not None), None)
    if given is None:
        return {}
    entry = unknown_experts(len(before), torch.Size(given.shape))
    for place, experts in enumerate(before[1:]):
        if experts is not None:
            entry[place] = torch.from_numpy(experts)
    return {ROUTED_EXPERTS_KEY: entry}
