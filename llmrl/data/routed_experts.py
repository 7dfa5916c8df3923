"""Routed experts of rows: the experts with which the engine of a mixture-of-experts model computed each token."""

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
"""Placeholder for unknown experts; the trainer's router chooses them."""


class Replay(TypedDict, total=False):
    """Parts of the sampler's computation to replay when rows are scored; entries that no row has are missing."""

    sampling_mask: SamplingMask
    """[num_row_tokens] ids that truncation kept."""
    routed_experts: list[torch.Tensor]
    """One `[num_tokens, num_layers, top_k]` int16 tensor of experts per row."""


def read_replay(batch: TensorDictBase, lengths: Sequence[int]) -> Replay:
    """Return the replay entries of a batch with one batch dimension; `lengths`: number of tokens of each row.

    Raises ValueError if an entry does not have one value per token.

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
    """Return the entry of tokens with unknown experts, `[num_tokens, num_layers, top_k]`."""
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
    """Return the entry of a row or a turn by its key; empty if no experts are known.

    `before`, `[num_tokens]`, has for each token the experts `[num_layers, top_k]` that computed the
    previous token, as in `TokenColumns`.

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
