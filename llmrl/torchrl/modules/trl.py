"""Adapters to TRL: a reward model as a TensorDict module, and a replay buffer as a data set."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey, unravel_key
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torchrl.data import ReplayBuffer

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.imports import require
from llmrl.data.ragged import check_entry, flat_batch, has_entry, is_lazy, ragged_column
from llmrl.data.tensordicts import plain

if TYPE_CHECKING:
    from datasets import IterableDataset


class HFRewardModelWrapper(KnownArguments, TensorDictModuleBase):
    """Module that scores rows with a sequence classifier, such as one that TRL's `RewardTrainer` trained.

    All rows of a batch are scored in one call. Ragged rows, without what their attention mask leaves out, are padded
    on the right with `model.config.pad_token_id`, or 0, and an attention mask is made for them.

    Args:
        model: module that takes `input_ids` and `attention_mask`, `[num_rows, num_tokens]`, and returns the scores, or
            an output with them in `logits` or `rewards`: `[num_rows]` or `[num_rows, 1]`.
        token_key: entry of the token ids.
        attention_mask_key: entry of the attention mask of padded rows; None calls the model without a mask.
        reward_key: entry for the scores, float32 `[num_rows]`.
        inference_mode: whether to compute without gradients.

    Raises:
        KeyError: on a call, if the tokens, or the mask of dense rows, are missing.
        ValueError: on a call, if rows differ in length and `attention_mask_key` is None.
        RuntimeError: on a call, if the model does not return one score per row.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> class Length(nn.Module):
        ...     def forward(self, input_ids, attention_mask):
        ...         return attention_mask.sum(-1, keepdim=True)
        >>> rows = lazy_stack([TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (2, 5)])
        >>> HFRewardModelWrapper(Length())(rows)["reward"]
        tensor([2., 5.])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        token_key: NestedKey = ("tokens", "full"),
        attention_mask_key: NestedKey | None = ("masks", "all_attention_mask"),
        reward_key: NestedKey = "reward",
        inference_mode: bool = False,
    ) -> None:
        super().__init__()
        self.in_keys = [key for key in (token_key, attention_mask_key) if key is not None]
        self.out_keys = [reward_key]
        self.model = model
        self.inference_mode = inference_mode

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the scores into a batch of rows of any shape."""
        token_key, *mask_key = self.in_keys
        batch = flat_batch(tensordict)
        token_ids, mask = self._padded(batch, token_key, *mask_key)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.inference_mode):
            output = self.model(input_ids=token_ids, **({"attention_mask": mask} if mask_key else {}))
        scores = next((getattr(output, name) for name in ("logits", "rewards") if hasattr(output, name)), output)
        if not isinstance(scores, torch.Tensor) or scores.shape not in ((len(token_ids),), (len(token_ids), 1)):
            raise RuntimeError(
                "HFRewardModelWrapper could not extract rewards: the model must return one scalar reward per input, "
                f"[{len(token_ids)}] or [{len(token_ids)}, 1]; got {getattr(scores, 'shape', type(scores).__name__)}."
            )
        return tensordict.set(self.out_keys[0], scores.float().reshape(tensordict.shape))

    def _padded(
        self, batch: TensorDictBase, token_key: NestedKey, mask_key: NestedKey | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the token ids and, if `mask_key` is given or rows were padded, their mask."""
        check_entry(batch, token_key, owner=type(self).__name__)
        if not (is_lazy(batch) or (isinstance(token_key, tuple) and is_lazy(batch.get(token_key[0])))):
            if mask_key is None:
                return batch.get(token_key), None
            check_entry(batch, mask_key, owner=type(self).__name__)
            return batch.get(token_key), batch.get(mask_key)
        rows = ragged_column(batch, token_key)
        if mask_key is not None and has_entry(batch, mask_key):  # rows that were padded before they were stacked
            masks = ragged_column(batch, mask_key)
            rows = [row[mask.bool()] if len(mask) == len(row) else row for row, mask in zip(rows, masks, strict=True)]
        if mask_key is None and len({len(row) for row in rows}) > 1:
            raise ValueError("rows of different lengths need an attention mask: leave attention_mask_key=None out.")
        pad_id = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return pad_sequence(rows, batch_first=True, padding_value=pad_id), mask


class TorchRLBufferDataset(KnownArguments, torch.utils.data.IterableDataset):
    """Data set of samples from a replay buffer, one dict per row; nested keys are joined by dots.

    Args:
        replay_buffer: buffer to draw from.
        batch_size: number of rows per sample of the buffer.
        keys: entries of a row; all entries by default.
        device: device to move tensors to; by default they are not moved.
        num_batches: number of samples per iteration of the data set; None samples endlessly.

    Raises:
        TypeError: if `replay_buffer` is not a ReplayBuffer.
        ValueError: if a number is not positive.
        KeyError: on iteration, if a row lacks one of `keys`.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyStackStorage
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(8))
        >>> _ = buffer.extend(TensorDict({"tokens": {"full": torch.ones(2, 3)}}, batch_size=2))
        >>> [{key: value.shape for key, value in row.items()} for row in TorchRLBufferDataset(buffer, 1)]
        [{'tokens.full': torch.Size([3])}]
    """

    def __init__(
        self,
        replay_buffer: ReplayBuffer,
        batch_size: int,
        *,
        keys: Sequence[NestedKey] | None = None,
        device: torch.device | str | None = None,
        num_batches: int | None = 1,
    ) -> None:
        if not isinstance(replay_buffer, ReplayBuffer):
            raise TypeError(f"replay_buffer must be a torchrl.data.ReplayBuffer, got {type(replay_buffer).__name__}.")
        for name, number in (("batch_size", batch_size), ("num_batches", num_batches)):
            if (number is not None or name == "batch_size") and (not isinstance(number, int) or number < 1):
                raise ValueError(f"{name} must be a positive integer, got {number!r}.")
        self.replay_buffer = replay_buffer
        self.batch_size = batch_size
        self.keys = None if keys is None else [unravel_key(key) for key in keys]
        self.device = None if device is None else torch.device(device)
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[dict[str, object]]:
        for _ in itertools.islice(itertools.count(), self.num_batches):  # None is endless
            for row in self.replay_buffer.sample(self.batch_size).unbind(0):
                yield self._fields(row)

    def _fields(self, row: TensorDictBase) -> dict[str, object]:
        keys = self.keys
        if keys is None:
            keys = list(row.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor))
        fields = {}
        for key in keys:
            check_entry(row, key, owner="A row of the replay buffer")
            value = plain(row.get(key))
            if self.device is not None and isinstance(value, torch.Tensor):
                value = value.to(self.device)
            fields[key if isinstance(key, str) else ".".join(key)] = value
        return fields

    def as_hf_dataset(self) -> IterableDataset:
        """Return the rows as a `datasets.IterableDataset` for TRL. Raises MissingExtraError without `datasets`."""
        return require("datasets", extra="data").IterableDataset.from_generator(self.__iter__)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.replay_buffer!r}, {self.batch_size}, keys={self.keys}, "
            f"device={self.device}, num_batches={self.num_batches})"
        )
