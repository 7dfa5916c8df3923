"""Per-row columns of ragged (lazily stacked), padded or nested batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDictBase
from tensordict.utils import NestedKey
from torch.nn.utils.rnn import pad_sequence

from llmrl._utils.arguments import refuse_unknown
from llmrl.data.tensordicts import restacked, tensordict_of

ATTENTION_MASK_KEY: NestedKey = ("masks", "all_attention_mask")


def flat_batch(tensordict: TensorDictBase) -> TensorDictBase:
    """Return the batch with exactly one batch dimension."""
    if tensordict.ndim == 1:
        return tensordict
    if tensordict.ndim == 0:
        return tensordict.unsqueeze(0)
    return tensordict.reshape(-1)


def has_entry(tensordict: TensorDictBase, key: NestedKey) -> bool:
    """Return whether all rows have a nested key."""
    path = (key,) if isinstance(key, str) else tuple(key)
    current = tensordict
    for name in path[:-1]:
        names = current.keys()
        if name not in names:
            return False
        current = current.get(name)
    names = current.keys()
    return path[-1] in names


def is_lazy(batch: object) -> bool:
    """Return whether a TensorDict or container is lazily stacked, so that rows may differ in length."""
    return isinstance(getattr(batch, "_tensordict", batch), LazyStackedTensorDict)


def has_padding_mask(tensordict: TensorDictBase) -> bool:
    """Return whether a batch is dense and has a mask of its padding."""
    return has_entry(tensordict, ATTENTION_MASK_KEY) and not is_lazy(tensordict) and not is_lazy(tensordict["masks"])


def ragged_column(tensordict: TensorDictBase, key: NestedKey) -> list[torch.Tensor]:
    """Return one tensor per row, without padding; raise KeyError if the entry is missing.

    Padding is read from `("masks", "all_attention_mask")`, because the padding id may be the end-of-turn id.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> batch = lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 3)])
        >>> [column.shape[0] for column in ragged_column(batch, "a")]
        [1, 3]
    """
    check_entry(tensordict, key)
    column = tensordict.get(key, as_list=True)
    rows = list(column.unbind(0)) if isinstance(column, torch.Tensor) else list(column)
    if not has_entry(tensordict, ATTENTION_MASK_KEY) or key == ATTENTION_MASK_KEY:
        return rows
    mask = tensordict.get(ATTENTION_MASK_KEY, as_list=True)
    return [
        row[is_real.bool()] if row.ndim and row.shape[0] == is_real.shape[0] and not is_real.all() else row
        for row, is_real in zip(rows, mask, strict=True)
    ]


def padded_like(
    tensordict: TensorDictBase, rows: Sequence[torch.Tensor], *, pad_left: bool = False
) -> list[torch.Tensor]:
    """Return one tensor per row with zeros at the batch's padding; the reverse of `ragged_column`.

    `pad_left` pads a batch without `("masks", "all_attention_mask")` on the left to one length.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"masks": {"all_attention_mask": torch.tensor([[False, True, True, False]])}}, [1])
        >>> padded_like(batch, [torch.tensor([5, 6])])
        [tensor([0, 5, 6, 0])]
    """
    if has_entry(tensordict, ATTENTION_MASK_KEY):
        masks = flat_batch(tensordict).get(ATTENTION_MASK_KEY, as_list=True)
        return [_at_real_tokens(row, mask.bool().to(row.device)) for row, mask in zip(rows, masks, strict=True)]
    if pad_left:
        return list(pad_sequence(list(rows), batch_first=True, padding_side="left"))
    return list(rows)


def _at_real_tokens(row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if len(row) == len(mask):
        return row
    padded = row.new_zeros(len(mask), *row.shape[1:])
    padded[mask] = row
    return padded


def check_entry(tensordict: TensorDictBase, key: NestedKey, *, owner: str = "The batch") -> None:
    """Raise a `KeyError` that lists the existing entries if an entry is missing."""
    if not has_entry(tensordict, key):
        raise KeyError(f"{owner} has no {key!r}; it has {sorted(map(str, tensordict.keys(True, True)))}.")


def write_column(tensordict: TensorDictBase, key: NestedKey, rows: Sequence[torch.Tensor]) -> None:
    """Write one tensor per row into a batch of any shape, in place; the reverse of `ragged_column`.

    The rows are in row-major order. Lazily stacked batches store them unchanged, padded batches at their real tokens,
    with zeros elsewhere. A missing container is created, lazily stacked if the rows differ in length. Raises ValueError
    if the rows differ in length and the batch is neither lazily stacked nor padded.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"a": torch.ones(2, 3)}, batch_size=[2])
        >>> write_column(batch, "b", [torch.zeros(3), torch.ones(3)])
        >>> batch["b"].tolist()
        [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """
    shape = tensordict.batch_size
    is_nested = not isinstance(key, str) and len(key) > 1
    holder = tensordict.get(key[0], None) if is_nested else None
    if isinstance(tensordict, LazyStackedTensorDict):
        places = torch.arange(len(rows)).reshape(shape).unbind(tensordict.stack_dim)
        for element, within in zip(tensordict.tensordicts, places, strict=True):
            write_column(element, key, [rows[place] for place in within.flatten().tolist()])
    elif is_lazy(holder):
        write_column(getattr(holder, "_tensordict", holder), key[1:], rows)
    elif len({row.shape for row in rows}) == 1 and not _is_padded(tensordict, rows):
        tensordict.set(key, torch.stack(list(rows)).reshape(*shape, *rows[0].shape))
    elif has_padding_mask(tensordict):
        padded = torch.stack(padded_like(tensordict, rows))
        tensordict.set(key, padded.reshape(*shape, *padded.shape[1:]))
    elif is_nested and holder is None:
        tensordict.set(key[0], restacked([tensordict_of({}) for _ in rows], shape))
        write_column(tensordict, key, rows)
    else:
        raise ValueError(
            f"{key!r} has rows of {sorted({len(row) for row in rows})} tokens, and the batch is neither lazily stacked "
            f"nor says where its padding is ({ATTENTION_MASK_KEY!r}); pass batch.to_lazystack(0)."
        )


def _is_padded(tensordict: TensorDictBase, rows: Sequence[torch.Tensor]) -> bool:
    """Return whether `rows`, of equal length, contain just the real tokens of the batch's longer, padded rows."""
    if not has_padding_mask(tensordict) or not rows[0].ndim:
        return False
    is_real = tensordict.get(ATTENTION_MASK_KEY).bool()
    return is_real.shape[-1] != len(rows[0]) and int(is_real.sum()) == sum(map(len, rows))


def value_column(tensordict: TensorDictBase, key: NestedKey) -> list[object]:
    """Return one Python value per row of a non-tensor or a scalar tensor entry.

    Raises KeyError if the entry is missing, and ValueError if it lost its texts (`check_text`).
    """
    check_entry(tensordict, key)
    column = tensordict.get(key)
    if isinstance(column, NonTensorData):
        return [column.data] * tensordict.batch_size[0]
    if isinstance(column, (NonTensorStack, torch.Tensor)):
        return list(column.tolist())
    check_text(column, key)
    return list(column)


def check_text(value: object, key: NestedKey) -> None:
    """Raise ValueError if an entry that should be a text is a TensorDict, as after a buffer's `load_state_dict`."""
    if isinstance(value, TensorDictBase):
        raise ValueError(
            f"{key!r} should be a text and is a TensorDict. The state_dict of TorchRL's replay buffers has no texts: "
            "to save rows, pickle the buffer."
        )


def as_padded_tensor(list_of_tensordicts: Sequence[TensorDictBase], **unknown: Never) -> TensorDictBase:
    """Stack TensorDicts, with each entry `[num_tokens, ...]` padded with zeros on the left.

    Example:
        >>> from tensordict import TensorDict
        >>> as_padded_tensor([TensorDict(a=torch.ones(n)) for n in (1, 2)])["a"].tolist()
        [[0.0, 1.0], [1.0, 1.0]]
    """
    refuse_unknown("as_padded_tensor", unknown, ["list_of_tensordicts"])
    return _joined(list_of_tensordicts, lambda rows: pad_sequence(rows, batch_first=True, padding_side="left"))


def as_nested_tensor(list_of_tensordicts: Sequence[TensorDictBase]) -> TensorDictBase:
    """Stack TensorDicts, with each entry `[num_tokens, ...]` as a jagged nested tensor.

    Example:
        >>> from tensordict import TensorDict
        >>> as_nested_tensor([TensorDict(a=torch.ones(n)) for n in (1, 2)])["a"].unbind()[1].tolist()
        [1.0, 1.0]
    """
    return _joined(list_of_tensordicts, lambda rows: torch.nested.as_nested_tensor(rows, layout=torch.jagged))


def _joined(
    tensordicts: Sequence[TensorDictBase], join: Callable[[list[torch.Tensor]], torch.Tensor]
) -> TensorDictBase:
    if not tensordicts:
        raise ValueError("list_of_tensordicts is empty; there is nothing to stack.")
    first, *others = tensordicts
    return first.apply(lambda *rows: join(list(rows)), *others, batch_size=[len(tensordicts), *first.batch_size])
