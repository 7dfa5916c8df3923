"""Inputs that a loss reads from a batch, as flat columns with one entry per token of its ragged rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl._utils.types import Tokenizer
from llmrl.data.keys import GROUP_ID_KEY
from llmrl.data.ragged import flat_batch, has_entry, ragged_column, value_column
from llmrl.data.routed_experts import Replay, read_replay
from llmrl.data.tensordicts import batch_elements

MaskingStrategy = Literal["sft", "rlhf", "generic"]
ROLLOUT_ID_KEY: NestedKey = ("rollout", "rollout_id")
_HISTORY: NestedKey = ("history", "full")


class NonFiniteColumnError(ValueError):
    """A column of the batch has NaN or infinite values at trained tokens."""

    def __init__(self, column: str, key: NestedKey, num_tokens: int, rows: Sequence[int]) -> None:
        super().__init__(
            f"The batch's {column} are not finite at every trained token: {key!r} has NaN or infinities at "
            f"{num_tokens} of them, in rows {_listed(rows)}. Remove these rows, or correct the source of the values."
        )
        self.column = column
        """Name of the column in `TokenInputs.columns`."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Columns of selected tokens, `[num_tokens]` each."""

    columns: dict[str, torch.Tensor]
    """Columns that the loss requested: `sample_log_probs`, `advantage`, `ref_log_probs`, ..."""
    weight: torch.Tensor
    """Weight of each token in the batch's loss (`aggregation_weights`)."""
    row_index: torch.Tensor
    sequence_index: torch.Tensor
    flat_index: torch.Tensor
    """Position of each token in the batch's concatenated rows."""

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.columns[name]

    def __contains__(self, name: str) -> bool:
        return name in self.columns


@dataclass(slots=True)
class LossInputs:
    """Inputs of a whole batch."""

    token_ids: list[torch.Tensor]
    """`[num_tokens]` per row."""
    scored_masks: list[torch.Tensor]
    """`[num_tokens]` bool per row: trained tokens, never the first."""
    row_starts: torch.Tensor
    """[num_rows] int64: start of each row in the flat columns."""
    columns: dict[str, torch.Tensor]
    """Columns of `TokenInputs`, `[num_row_tokens]` or `[num_row_tokens, ...]` each."""
    sequence_index: torch.Tensor
    """[num_row_tokens] int64: rollout of each token; all rows of a rollout are one sequence."""
    num_sequences: int
    group_of_sequence: torch.Tensor
    """[num_sequences] int64: group of each rollout; a rollout without a group is a group of its own."""
    replay: Replay = field(default_factory=Replay)
    """Sampling masks and routed experts that the trainer replays."""
    weights: torch.Tensor | None = None
    """[num_row_tokens]: set by the loss for the whole batch."""

    @property
    def num_scored(self) -> int:
        """Number of trained tokens in the batch."""
        return sum(int(mask.sum()) for mask in self.scored_masks)

    @property
    def is_scored(self) -> torch.Tensor:
        """[num_row_tokens] bool: trained tokens."""
        return torch.cat(self.scored_masks)

    def tokens(self, row_index: torch.Tensor, token_index: torch.Tensor) -> TokenInputs:
        """Return the columns of selected tokens."""
        assert self.weights is not None
        flat = self.row_starts[row_index] + token_index
        chosen = {name: column[flat] for name, column in self.columns.items()}
        return TokenInputs(chosen, self.weights[flat], row_index, self.sequence_index[flat], flat)


def read_inputs(
    tensordict: TensorDictBase,
    *,
    tokens_key: NestedKey,
    masking_strategy: MaskingStrategy,
    mask_key: NestedKey,
    token_columns: Mapping[str, NestedKey],
    row_columns: Mapping[str, NestedKey] | None = None,
    device: torch.device | None = None,
) -> LossInputs:
    """Read a batch of training rows, ragged or padded.

    Args:
        tensordict: the rows.
        tokens_key, mask_key: entries of the token ids and, for the strategy `rlhf`, of the loss mask.
        masking_strategy: rule that selects the trained tokens.
        token_columns: entries with one number per token, by column name.
        row_columns: entries with one number per row or per token, by column name.
        device: device of the flat columns.

    Raises:
        KeyError: if an entry is missing.
        ValueError: if a column does not have one entry per token, or log-probs are missing at trained tokens.
        NonFiniteColumnError: if a column is not finite at a trained token.
    """
    batch = flat_batch(tensordict)
    token_ids = ragged_column(batch, tokens_key)
    lengths = [ids.shape[0] for ids in token_ids]
    masks = [mask.clone() for mask in _masks(batch, token_ids, masking_strategy, mask_key)]
    for mask in masks:
        mask[:1] = False
    row_columns = row_columns or {}
    columns = {name: _flat(batch, key, lengths) for name, key in token_columns.items()}
    columns |= {name: _spread(batch, key, lengths) for name, key in row_columns.items()}
    is_scored = torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)
    repeats = torch.tensor(lengths, dtype=torch.int64)
    for name, key in {**token_columns, **row_columns}.items():
        is_broken = is_scored.cpu() & ~columns[name].isfinite().cpu()
        if is_broken.any():
            rows = torch.arange(len(lengths)).repeat_interleave(repeats)[is_broken].unique().tolist()
            raise NonFiniteColumnError(name, key, int(is_broken.sum()), rows)
    if masking_strategy != "rlhf" and has_entry(batch, mask_key):
        is_unmasked = is_scored & ~torch.cat([mask.bool() for mask in ragged_column(batch, mask_key)])
        _check_scored(columns, token_columns, is_unmasked.cpu(), masking_strategy)
    sequence_of_row, num_sequences = _numbered(batch, ROLLOUT_ID_KEY)
    group_of_row = sequence_of_row
    if has_entry(batch, GROUP_ID_KEY):
        group_of_row, _ = _numbered(batch, GROUP_ID_KEY)
    return LossInputs(
        token_ids=token_ids,
        scored_masks=masks,
        row_starts=(repeats.cumsum(0) - repeats).to(device),
        columns={name: column.to(device) for name, column in columns.items()},
        sequence_index=sequence_of_row.repeat_interleave(repeats).to(device),
        num_sequences=num_sequences,
        group_of_sequence=torch.zeros(num_sequences, dtype=torch.int64)
        .index_copy(0, sequence_of_row, group_of_row)
        .to(device),
        replay=read_replay(batch, lengths),
    )


def has_column(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Return whether a batch has an optional entry; raise ValueError if only some of its rows have it."""
    if has_entry(tensordict, key):
        return True
    has_one = [has_entry(row, key) for row in flat_batch(tensordict).unbind(0)]
    if any(has_one):
        lacking = [index for index, has in enumerate(has_one) if not has]
        raise ValueError(
            f"some rows of the batch have {key!r}, and rows {_listed(lacking)} do not: write it into all rows or into "
            "none."
        )
    return False


def read_vectors(tensordict: TensorDictBase, key: NestedKey, inputs: LossInputs) -> torch.Tensor:
    """Return an entry with several numbers per token, `[num_row_tokens, ...]`.

    Raises ValueError unless each row has one vector per token and all vectors have the same length.
    """
    rows = ragged_column(flat_batch(tensordict), key)
    shapes = [tuple(row.shape) for row in rows]
    expected = [(len(ids), *shapes[0][1:]) for ids in inputs.token_ids]
    if shapes != expected:
        raise ValueError(f"{key!r} must have one vector per token, of equal length; expected {expected}, got {shapes}.")
    return torch.cat(rows)


def with_tokens(
    tensordict: TensorDictBase,
    tokenizer: Tokenizer | None,
    *,
    tokens_key: NestedKey,
    mask_key: NestedKey,
    **template: Any,
) -> TensorDictBase:
    """Return a batch of conversations with their tokens and the mask of the assistant's tokens.

    The batch is returned as is if it has tokens or no conversations, or if there is no tokenizer.
    `template` are options of `History.apply_chat_template`.
    """
    if tokenizer is None or has_entry(tensordict, tokens_key) or not has_entry(tensordict, _HISTORY):
        return tensordict
    rows = [row.copy() for row in batch_elements(tensordict)]
    template |= {"add_generation_prompt": False, "return_dict": True, "return_assistant_tokens_mask": True}
    for row in rows:
        written = row.get(_HISTORY).apply_chat_template(tokenizer, **template)
        row.set(tokens_key, written["input_ids"])
        row.set(mask_key, written["assistant_masks"])
    return lazy_stack(rows)


def at_least_float32(values: torch.Tensor) -> torch.Tensor:
    """Return values in at least float32: exponentials of log-ratios overflow in float16 and are coarse in bfloat16."""
    return values.float() if values.dtype.itemsize < 4 and values.is_floating_point() else values


def _listed(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def _check_scored(
    columns: Mapping[str, torch.Tensor],
    keys: Mapping[str, NestedKey],
    is_unmasked: torch.Tensor,
    masking_strategy: MaskingStrategy,
) -> None:
    """Raise ValueError if log-probs are zero at all trained tokens outside the loss mask: they were not computed."""
    for name, key in keys.items():
        outside = columns[name].cpu()[is_unmasked]
        if name.endswith("log_probs") and len(outside) and not outside.any():
            raise ValueError(
                f"masking_strategy={masking_strategy!r} trains on tokens outside the mask, but {key!r} is 0 there: "
                "they were not scored. Score all tokens with write_log_probs(..., assistant_only=False), or use "
                "'rlhf'."
            )


def _masks(
    batch: TensorDictBase, token_ids: list[torch.Tensor], masking_strategy: MaskingStrategy, mask_key: NestedKey
) -> list[torch.Tensor]:
    if masking_strategy == "rlhf":
        return [mask.bool() for mask in ragged_column(batch, mask_key)]
    if masking_strategy == "generic":
        return [torch.ones_like(ids, dtype=torch.bool) for ids in token_ids]
    return masks_after_prompt(batch, token_ids)


def masks_after_prompt(batch: TensorDictBase, token_ids: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return masks of each row's tokens after `("tokens", "prompt")`, `[num_tokens]` bool."""
    prompts = ragged_column(batch, ("tokens", "prompt"))
    return [torch.arange(len(ids)) >= len(prompt) for ids, prompt in zip(token_ids, prompts, strict=True)]


def _flat(batch: TensorDictBase, key: NestedKey, lengths: Sequence[int]) -> torch.Tensor:
    rows = []
    for row, length in zip(ragged_column(batch, key), lengths, strict=True):
        if row.numel() != length:
            raise ValueError(f"{key!r} must have one entry per token, {length}, got shape {tuple(row.shape)}.")
        if row.requires_grad:
            raise ValueError(f"{key!r} of the batch requires grad: detach it.")
        rows.append(at_least_float32(row.reshape(length)))
    return torch.cat(rows) if rows else torch.zeros(0)


def _spread(batch: TensorDictBase, key: NestedKey, lengths: Sequence[int]) -> torch.Tensor:
    """Return one number per token, from one per row or one per token."""
    rows = []
    for row, length in zip(ragged_column(batch, key), lengths, strict=True):
        if row.numel() not in (1, length):
            raise ValueError(f"{key!r} must have one entry per row or per token ({length}), got {tuple(row.shape)}.")
        rows.append(row.reshape(-1).float().expand(length))
    return torch.cat(rows) if rows else torch.zeros(0)


def _numbered(batch: TensorDictBase, key: NestedKey) -> tuple[torch.Tensor, int]:
    """Return a number per row, equal for equal ids, and the count of numbers; without ids each row has its own."""
    if not has_entry(batch, key):
        return torch.arange(batch.batch_size[0]), batch.batch_size[0]
    numbers: dict[object, int] = {}
    # Ids of shape [1] are lists, which MCAdvantage accepts as well.
    names = (name if isinstance(name, Hashable) else str(name) for name in value_column(batch, key))
    index = [numbers.setdefault(name, len(numbers)) for name in names]
    return torch.tensor(index, dtype=torch.int64), len(numbers)
