"""Supervised fine-tuning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl._utils.arguments import KnownArguments, check_choice
from llmrl._utils.types import Tokenizer
from llmrl.objectives.kl import KLEstimator, kl_term
from llmrl.objectives.losses.base import MicroLoss
from llmrl.objectives.losses.inputs import LossInputs, MaskingStrategy, TokenInputs
from llmrl.objectives.losses.outputs import SFTLossOutput, summarized
from llmrl.objectives.losses.sequence_loss import Reduction, SequenceLoss
from llmrl.objectives.ratios import sequence_totals


class SFTLoss(KnownArguments, SequenceLoss):
    """Negative log-likelihood of the trained tokens, optionally with a KL to a reference.

    Names, keys and defaults are TorchRL's, but the KL and `minor_sft`'s reference cover only trained tokens.

    Args:
        actor_network: `TransformersWrapper`, or any TensorDict module that writes `log_probs`' entry with gradients.
        kl_to_ref_coeff: coefficient of the KL to the reference, with log-probs read from `ref_log_prob`.
        kl_estimator: estimator of `kl_estimate`; it estimates the KL only for tokens that the policy sampled.
        loss_function: `sft`, or `minor_sft`, `-log sigmoid(beta (log pi - log pi_ref))` of a row's
            log-likelihoods (arXiv:2408.10642, equation 8), which sets a given `kl_to_ref_coeff` to
            0 with a warning and does not allow `token_mean`.
        beta: coefficient of `minor_sft`.
        masking_strategy: trained tokens: `rlhf` the loss mask, `sft` those after `("tokens", "prompt")`, `generic` all.
        reduction, normalize_by_seq_length, tokenizer, tokenizer_kwargs: as in `SequenceLoss`. Most
            trainers of language models use the reduction `token_mean`.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries that `set_keys` can rename."""

        action: NestedKey = ("tokens", "full")
        log_probs: NestedKey = ("log_probs", "full")
        ref_log_prob: NestedKey = ("next", "ref_log_probs", "full")
        assistant_mask: NestedKey = ("masks", "all_assistant_mask")

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        reduction: Reduction = "mean",
        normalize_by_seq_length: bool = True,
        kl_to_ref_coeff: float | None = None,
        kl_estimator: KLEstimator = "k3",
        loss_function: Literal["sft", "minor_sft"] = "sft",
        beta: float = 0.1,
        masking_strategy: MaskingStrategy = "rlhf",
        tokenizer: Tokenizer | None = None,
        tokenizer_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(
            reduction=reduction,
            normalize_by_seq_length=normalize_by_seq_length,
            masking_strategy=masking_strategy,
            tokenizer=tokenizer,
            tokenizer_kwargs=tokenizer_kwargs,
        )
        check_choice(get_args(KLEstimator), kl_estimator=kl_estimator)
        if loss_function not in ("sft", "minor_sft"):
            raise ValueError(f"loss_function must be 'sft' or 'minor_sft', got {loss_function!r}.")
        if loss_function == "minor_sft":
            if kl_to_ref_coeff is not None:
                warnings.warn(
                    f"kl_to_ref_coeff={kl_to_ref_coeff} has no meaning with loss_function='minor_sft', in which the "
                    "reference is already a regularizer; the coefficient is set to 0.",
                    stacklevel=3,
                )
                kl_to_ref_coeff = 0.0  # as in TorchRL, so that the output has the KL, which scripts log
            if reduction == "token_mean":
                raise ValueError(
                    "reduction='token_mean' has no meaning with loss_function='minor_sft', which has one loss per "
                    "sequence; use 'mean'."
                )
            # A row has one loss, which is spread over its tokens.
            self.aggregation = "sequence_mean"
        self.actor_network = actor_network
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.kl_estimator: KLEstimator = kl_estimator
        self.loss_function = loss_function
        self.beta = beta

    @property
    def _has_reference(self) -> bool:
        return self.kl_to_ref_coeff is not None or self.loss_function == "minor_sft"

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from a batch."""
        keys = self.tensor_keys
        read = [keys.action, *self._mask_keys]
        if self._has_reference:
            read.append(keys.ref_log_prob)
        return read

    @property
    def out_keys(self) -> list[str]:
        """Fields of the output that are set."""
        keys = ["loss_sft"]
        if self.kl_to_ref_coeff is not None:
            keys.append("loss_kl_to_ref")
        if self._has_reference:
            keys += ["kl_to_ref", "num_clamped_tokens"]
        if self.measures_entropy:
            keys.append("entropy")
        return keys

    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a whole batch and compute the weight of every trained token."""
        keys = self.tensor_keys
        token_columns = {}
        if self._has_reference:
            token_columns["ref_log_probs"] = keys.ref_log_prob
        inputs = self._read(self._with_tokens(tensordict), token_columns)
        share = 1.0 / max(1, inputs.num_scored)
        inputs.columns["token_share"] = torch.full(inputs.sequence_index.shape, share, device=self._device())
        return self._weighted(inputs)

    def token_loss(
        self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None, flat_index: torch.Tensor
    ) -> MicroLoss:
        """Return the loss of `[num_tokens]` trained tokens, from their current log-probs."""
        losses = {}
        measured = {}
        if self._has_reference:
            divergence, is_clamped = kl_term(log_probs, tokens["ref_log_probs"], self.kl_estimator)
            measured["kl_to_ref"] = divergence.detach()
            measured["num_clamped_tokens"] = is_clamped.to(divergence.dtype)
            if self.kl_to_ref_coeff is not None:
                losses["loss_kl_to_ref"] = self.kl_to_ref_coeff * divergence * tokens["token_share"]
        if self.loss_function == "minor_sft":
            margin = sequence_totals(
                log_probs - tokens["ref_log_probs"], tokens.row_index, is_mean=self.normalize_by_seq_length
            )
            loss = -torch.nn.functional.logsigmoid(self.beta * margin)
        else:
            loss = -log_probs
        losses["loss_sft"] = loss * tokens.weight
        return MicroLoss(losses, measured, flat_index, tokens.sequence_index)

    def output(self, losses: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> SFTLossOutput:
        """Return the losses, and means over trained tokens."""
        return SFTLossOutput(**losses, **summarized(measured))
