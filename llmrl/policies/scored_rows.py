"""Base class of policies that score: it reads tokens and masks, and writes columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from tensordict import TensorDictBase

from llmrl.data import History, Masks, Text, Tokens
from llmrl.data.keys import LOSS_MASK_KEY, TOKENS_KEY
from llmrl.data.ragged import (
    ATTENTION_MASK_KEY,
    flat_batch,
    has_entry,
    has_padding_mask,
    padded_like,
    ragged_column,
    write_column,
)
from llmrl.data.routed_experts import ROUTED_EXPERTS_KEY, Replay, read_replay
from llmrl.data.sampling_mask import SAMPLING_MASK_KEY
from llmrl.data.tensordicts import batch_elements, plain, restacked
from llmrl.policies.base import LLMWrapperBase


class ScoresRows(LLMWrapperBase):
    """Base class of policies that score the tokens of a batch, tokenized if needed."""

    _can_score = True

    def scored_tokens(self, tensordict: TensorDictBase) -> tuple[list[torch.Tensor], list[torch.Tensor], Replay]:
        """Return each row's token ids, scored mask and replayed columns; tokenize if needed."""
        if has_entry(tensordict, self.attention_mask_key) and not has_entry(tensordict, ATTENTION_MASK_KEY):
            attention = tensordict.get(self.attention_mask_key).bool()
            if tensordict.get("masks", None) is None:
                tensordict.set("masks", Masks(all_attention_mask=attention, batch_size=tensordict.batch_size))
            else:  # the other masks stay
                tensordict.set(ATTENTION_MASK_KEY, attention)
        if self.input_mode == "history" and not self.prefer_tokens:
            for replaced in ("tokens", "masks", SAMPLING_MASK_KEY, ROUTED_EXPERTS_KEY):
                tensordict.pop(replaced, None)
        is_given = self.input_mode == "tokens" or (self.input_mode == "history" and has_entry(tensordict, TOKENS_KEY))
        if not is_given:
            self._tokenize(tensordict)
        batch = flat_batch(tensordict)
        key = self.input_key if self.input_mode == "tokens" else TOKENS_KEY
        token_ids = ragged_column(batch, key)
        replay = read_replay(batch, [len(ids) for ids in token_ids]) if is_given else Replay()
        if not has_entry(batch, LOSS_MASK_KEY):
            return token_ids, [torch.ones_like(ids).bool() for ids in token_ids], replay
        return token_ids, [mask.bool() for mask in ragged_column(batch, LOSS_MASK_KEY)], replay

    def _tokenize(self, tensordict: TensorDictBase) -> None:
        if self.tokenizer is None or not has_entry(tensordict, self.input_key):
            raise ValueError(
                f"Expected {TOKENS_KEY!r} in the tensordict, or {self.input_key!r} and a policy with tokenizer=; the "
                f"tensordict has {sorted(map(str, tensordict.keys(True, True)))}."
            )
        tensordict.pop("masks", None)  # they belong to other tokens
        texts = []
        tokens = []
        masks = []
        for element in batch_elements(tensordict):
            given = plain(element.get(self.input_key))
            if self.input_mode == "text":
                texts.append(given)
                tokens.append(torch.tensor(self.tokenizer.encode(given, add_special_tokens=False)))
                continue
            if not isinstance(given, History):
                raise TypeError(f"Expected History object at {self.input_key!r}, got {given!r:.80}.")
            render = partial(
                given.apply_chat_template,
                self.tokenizer,
                add_generation_prompt=False,
                chat_template=self.chat_template,
            )
            texts.append(render(tokenize=False))
            written = render(return_dict=True, return_assistant_tokens_mask=True)
            tokens.append(written["input_ids"])
            masks.append(written["assistant_masks"])
        tensordict.set("text", restacked([Text(full=text) for text in texts], tensordict.batch_size))
        self.write_scored(tensordict, "tokens", Tokens, {"full": tokens})
        written_masks = {"all_attention_mask": [torch.ones_like(ids).bool() for ids in tokens]}
        if masks:
            written_masks["all_assistant_mask"] = masks
        self.write_scored(tensordict, "masks", Masks, written_masks)

    def write_scored(
        self, tensordict: TensorDictBase, key: str, cls: type, columns: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        """Write one tensor per row into a container; `pad_output` pads like the batch, or left."""
        if self.pad_output:
            columns = {name: padded_like(tensordict, rows, pad_left=True) for name, rows in columns.items()}
        shape = tensordict.batch_size
        if not has_entry(tensordict, key):
            if has_padding_mask(tensordict):
                is_padded = self.pad_output or not bool(tensordict.get(ATTENTION_MASK_KEY).all())
                made = cls(padded=is_padded, batch_size=shape)
            else:
                made = restacked([cls(padded=self.pad_output) for _ in range(shape.numel())], shape)
            tensordict.set(key, made)
        for name, rows in columns.items():
            write_column(tensordict, (key, name), rows)
