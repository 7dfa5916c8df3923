"""What a loss reads from a batch, flat: one entry for each token of the ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from llmrl.data.ragged import flat_batch, has_entry, ragged_column, value_column

MaskingStrategy = Literal["sft", "rlhf", "generic"]
ROLLOUT_ID_KEY: NestedKey = ("rollout", "rollout_id")


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Columns of chosen tokens, `[num_tokens]` each."""

    sample_log_probs: torch.Tensor
    """The sampler's."""
    advantage: torch.Tensor
    weight: torch.Tensor
    """Share of the token in the batch's loss (`aggregation_weights`)."""
    row_index: torch.Tensor
    old_log_probs: torch.Tensor | None = None
    """The trainer's before this batch's first update, where they were computed."""
    ref_log_probs: torch.Tensor | None = None


@dataclass(slots=True)
class LossInputs:
    """A batch, ready to be scored."""

    token_ids: list[torch.Tensor]
    """`[num_tokens]` a row."""
    scored_masks: list[torch.Tensor]
    """`[num_tokens]` bool a row: trained tokens, never the first."""
    row_starts: torch.Tensor
    """[num_rows] int64: where each row's tokens start in the flat columns."""
    columns: dict[str, torch.Tensor]
    """`[num_row_tokens]` each: the fields of `TokenInputs` but `weight` and `row_index`."""
    sequence_index: torch.Tensor
    """[num_row_tokens] int64: the rollout of each token; rows of one rollout are one sequence."""
    num_sequences: int
    weights: torch.Tensor | None = None
    """[num_row_tokens]: set by the loss, for the whole batch."""

    @property
    def num_scored(self) -> int:
        """Trained tokens of the batch."""
        return sum(int(mask.sum()) for mask in self.scored_masks)

    @property
    def is_scored(self) -> torch.Tensor:
        """[num_row_tokens] bool."""
        return torch.cat(self.scored_masks)

    def tokens(self, row_index: torch.Tensor, token_index: torch.Tensor) -> TokenInputs:
        """The columns of chosen tokens."""
        assert self.weights is not None
        flat = self.row_starts[row_index] + token_index
        chosen = {name: column[flat] for name, column in self.columns.items()}
        return TokenInputs(weight=self.weights[flat], row_index=row_index, **chosen)


def read_inputs(
    tensordict: TensorDictBase,
    *,
    tokens_key: NestedKey,
    sample_log_prob_key: NestedKey,
    advantage_key: NestedKey,
    masking_strategy: MaskingStrategy,
    mask_key: NestedKey,
    old_log_prob_key: NestedKey | None = None,
    ref_log_prob_key: NestedKey | None = None,
    device: torch.device | None = None,
) -> LossInputs:
    """Read a batch of training rows, ragged or padded; optional entries are read when their key is given.

    Raises:
        KeyError: when an entry is missing.
        ValueError: when a column has not one entry a token, or a log-prob of a trained token is not finite.
    """
    batch = flat_batch(tensordict)
    token_ids = ragged_column(batch, tokens_key)
    lengths = [ids.shape[0] for ids in token_ids]
    masks = [mask.clone() for mask in _masks(batch, token_ids, masking_strategy, mask_key)]
    for mask in masks:
        mask[:1] = False
    columns = {
        "sample_log_probs": _flat(batch, sample_log_prob_key, lengths),
        "advantage": _advantage(batch, advantage_key, lengths),
    }
    if old_log_prob_key is not None:
        columns["old_log_probs"] = _flat(batch, old_log_prob_key, lengths)
    if ref_log_prob_key is not None:
        columns["ref_log_probs"] = _flat(batch, ref_log_prob_key, lengths)
    is_scored = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)
    for name, column in columns.items():
        if not column[is_scored].isfinite().all():
            raise ValueError(f"The batch's {name} are not finite at every trained token.")
    sequence_of_row, num_sequences = _sequences(batch)
    repeats = torch.tensor(lengths, dtype=torch.int64)
    return LossInputs(
        token_ids=token_ids,
        scored_masks=masks,
        row_starts=(repeats.cumsum(0) - repeats).to(device),
        columns={name: column.to(device) for name, column in columns.items()},
        sequence_index=sequence_of_row.repeat_interleave(repeats).to(device),
        num_sequences=num_sequences,
    )


def _masks(
    batch: TensorDictBase, token_ids: list[torch.Tensor], masking_strategy: MaskingStrategy, mask_key: NestedKey
) -> list[torch.Tensor]:
    if masking_strategy == "rlhf":
        return [mask.bool() for mask in ragged_column(batch, mask_key)]
    if masking_strategy == "generic":
        return [torch.ones_like(ids, dtype=torch.bool) for ids in token_ids]
    prompts = ragged_column(batch, ("tokens", "prompt"))
    return [torch.arange(ids.shape[0]) >= prompt.shape[0] for ids, prompt in zip(token_ids, prompts, strict=True)]


def _flat(batch: TensorDictBase, key: NestedKey, lengths: Sequence[int]) -> torch.Tensor:
    rows = []
    for row, length in zip(ragged_column(batch, key), lengths, strict=True):
        if row.numel() != length:
            raise ValueError(f"{key!r} must have one entry a token, {length}, got shape {tuple(row.shape)}.")
        if row.requires_grad:
            raise ValueError(f"{key!r} of the batch requires grad: it must be data, detach it.")
        rows.append(row.reshape(length))
    return torch.cat(rows) if rows else torch.zeros(0)


def _advantage(batch: TensorDictBase, key: NestedKey, lengths: Sequence[int]) -> torch.Tensor:
    """One advantage a token, from one a row or one a token."""
    rows = []
    for row, length in zip(ragged_column(batch, key), lengths, strict=True):
        if row.numel() not in (1, length):
            raise ValueError(f"{key!r} must have one entry a row or a token ({length}), got {tuple(row.shape)}.")
        rows.append(row.reshape(-1).float().expand(length))
    return torch.cat(rows) if rows else torch.zeros(0)


def _sequences(batch: TensorDictBase) -> tuple[torch.Tensor, int]:
    """Sequence of each row: its rollout, or the row itself where no rollout id is given."""
    if not has_entry(batch, ROLLOUT_ID_KEY):
        return torch.arange(batch.batch_size[0]), batch.batch_size[0]
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(name, len(numbers)) for name in value_column(batch, ROLLOUT_ID_KEY)]
    return torch.tensor(index, dtype=torch.int64), len(numbers)
