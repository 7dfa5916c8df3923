"""Base class of losses per sequence, with TorchRL's `reduction` and `normalize_by_seq_length`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase

from llmrl._utils.arguments import check_choice
from llmrl._utils.types import Tokenizer
from llmrl.objectives.losses.base import LLMLoss
from llmrl.objectives.losses.inputs import LossInputs, MaskingStrategy, with_tokens

Reduction = Literal["mean", "sum", "token_mean", "none"]


class SequenceLoss(LLMLoss):
    """Base class of losses that sum or average over the trained tokens of each sequence, then over sequences.

    Args:
        reduction: `mean` or `sum` over sequences, `token_mean` over the batch's trained tokens, or
            `none` for one loss per sequence that has trained tokens, in order.
        normalize_by_seq_length: divide a sequence's loss by its number of trained tokens; ignored for `token_mean`.
        tokenizer, tokenizer_kwargs: tokenizer for batches that have `("history", "full")` but no tokens, by default
            the policy's, and options of `History.apply_chat_template`, by default the policy's template.
    """

    def __init__(
        self,
        *,
        reduction: Reduction,
        normalize_by_seq_length: bool,
        masking_strategy: MaskingStrategy,
        tokenizer: Tokenizer | None,
        tokenizer_kwargs: Mapping[str, object] | None,
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._tokenizer_kwargs = tokenizer_kwargs
        check_choice(get_args(Reduction), reduction=reduction)
        check_choice(get_args(MaskingStrategy), masking_strategy=masking_strategy)
        self.sequence_reduction: Reduction = reduction
        self.normalize_by_seq_length = normalize_by_seq_length
        self.masking_strategy = masking_strategy
        self.aggregation = "sequence_mean" if normalize_by_seq_length else "sequence_sum"
        if reduction == "token_mean":
            self.aggregation = "token_mean"

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is a single number."""
        return self.sequence_reduction != "none"

    def _with_tokens(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the batch, with tokens added if it has only conversations."""
        template = self._tokenizer_kwargs
        if template is None:
            template = {"chat_template": getattr(self.actor_network, "chat_template", None)}
        tokenizer = self._tokenizer or getattr(self.actor_network, "tokenizer", None)
        keys = self.tensor_keys
        return with_tokens(tensordict, tokenizer, tokens_key=keys.action, mask_key=keys.assistant_mask, **template)

    def _weighted(self, inputs: LossInputs) -> LossInputs:
        super()._weighted(inputs)
        assert inputs.weights is not None
        if self.sequence_reduction in ("sum", "none"):
            inputs.weights *= inputs.num_sequences
        return inputs

    def _reduce(self, name: str, losses: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
        if self.is_scalar or name == "loss_kl_to_ref":
            return losses.sum()
        numbers, index = sequence_index.unique(return_inverse=True)
        return losses.new_zeros(numbers.shape[0]).index_add(0, index, losses)
