"""On-policy distillation as a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer
from llmrl.data.ragged import check_entry
from llmrl.objectives.kl import kl_term
from llmrl.objectives.losses.base import MicroLoss, PackedTokens
from llmrl.objectives.losses.inputs import LossInputs, MaskingStrategy, TokenInputs, read_vectors
from llmrl.objectives.losses.outputs import DistillationLossOutput, summarized
from llmrl.objectives.losses.sequence_loss import Reduction, SequenceLoss


class GivesDivergence(Protocol):
    """Protocol of teachers that compare their distributions with those of a student that packs rows."""

    in_keys: list[NestedKey]
    """Entries read besides the tokens, `[num_tokens, ...]` per row."""

    @property
    def packed_divergence(self) -> Callable[..., torch.Tensor]:
        """Function of student, micro-batch, direction and columns of `in_keys` that returns `[num_scored]` numbers."""


class DistillationLoss(KnownArguments, SequenceLoss):
    """KL between student and teacher on the trained tokens (arXiv:2306.13649, section 3).

    Without `teacher`, the KL is estimated from the teacher's log-probs of the same tokens:
    `write_log_probs(teacher, batch, ("next", "teacher_log_probs", "full"))`. For tokens that the student sampled, `k2`
    has the gradient of the reverse KL, and `k3`, as in TorchRL, that of the forward KL.

    With `teacher`, the divergence of both distributions at each trained token is computed exactly (GKD, equation 3),
    whichever model sampled the token. `TeacherDistribution` uses whole distributions and no entries
    of the batch; `TeacherTopK` reads the teacher's most likely ids from the batch.

    Names, keys and defaults are TorchRL's. `kl_to_teacher` is the mean over trained tokens.

    Args:
        actor_network: the student, as for `GRPOLoss`.
        kl_direction: `reverse`, KL(student || teacher), for tokens that the student sampled; `forward`, KL(teacher ||
            student), for tokens that the teacher sampled; with `teacher` also `js`, for any tokens.
        kl_estimator: `k2` or `k3` (`kl_estimate`); ignored with `teacher`.
        teacher: `TeacherDistribution` or `TeacherTopK` of `llmrl.trainer`.
        masking_strategy: trained tokens: `rlhf` the loss mask, `sft` those after `("tokens", "prompt")`, `generic` all.
        reduction, normalize_by_seq_length, tokenizer, tokenizer_kwargs: as in `SequenceLoss`.
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries that `set_keys` can rename."""

        action: NestedKey = ("tokens", "full")
        log_probs: NestedKey = ("log_probs", "full")
        teacher_log_prob: NestedKey = ("next", "teacher_log_probs", "full")
        assistant_mask: NestedKey = ("masks", "all_assistant_mask")

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        kl_direction: Literal["reverse", "forward", "js"] = "reverse",
        kl_estimator: Literal["k2", "k3"] = "k3",
        teacher: GivesDivergence | None = None,
        reduction: Reduction = "mean",
        normalize_by_seq_length: bool = True,
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
        if kl_direction not in ("reverse", "forward", "js") or (kl_direction == "js" and teacher is None):
            raise ValueError(
                f"kl_direction must be 'reverse' or 'forward', or 'js' with teacher=, got {kl_direction!r}."
            )
        if kl_estimator not in ("k2", "k3"):
            raise ValueError(
                f"kl_estimator must be 'k2' or 'k3', got {kl_estimator!r}; the gradient of k1 is independent of the "
                "teacher."
            )
        self.actor_network = actor_network
        self.teacher = teacher
        self.kl_direction: Literal["reverse", "forward", "js"] = kl_direction
        self.kl_estimator: Literal["k2", "k3"] = kl_estimator

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from a batch."""
        keys = self.tensor_keys
        read = [keys.action]
        if self.teacher is None:
            read.append(keys.teacher_log_prob)
        else:
            read += self.teacher.in_keys
        read += self._mask_keys
        return read

    @property
    def out_keys(self) -> list[str]:
        """Fields of the output that are set."""
        if self.teacher is not None:
            return ["loss_distill", "kl_to_teacher"]
        keys = ["loss_distill", "kl_to_teacher", "num_clamped_tokens"]
        if self.measures_entropy:
            keys.append("entropy")
        return keys

    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a batch and compute token weights; raise TypeError if `teacher=` lacks a policy that packs rows."""
        if self.teacher is not None and not hasattr(self.actor_network, "packed_head"):
            raise TypeError(
                f"teacher= compares distributions, but actor_network is a {type(self.actor_network).__name__}, which "
                "writes the log-probs of tokens alone: pass a TransformersWrapper, or leave teacher= out and write the "
                "teacher's log-probs into the batch."
            )
        keys = self.tensor_keys
        batch = self._with_tokens(tensordict)
        token_columns = {}
        if self.teacher is None:
            check_entry(batch, keys.teacher_log_prob, owner="Teacher log-probs are missing: the batch")
            token_columns["teacher_log_probs"] = keys.teacher_log_prob
        inputs = self._read(batch, token_columns)
        if self.teacher is not None:
            for key in self.teacher.in_keys:
                inputs.columns[str(key)] = read_vectors(batch, key, inputs).to(self._device())
        return self._weighted(inputs)

    def packed_loss(self, inputs: LossInputs, packed: PackedTokens) -> MicroLoss:
        """Return the loss of one packed micro-batch of `inputs`."""
        if self.teacher is None:
            return super().packed_loss(inputs, packed)
        tokens = inputs.tokens(packed.row_index, packed.token_index)
        read = [tokens[str(key)] for key in self.teacher.in_keys]
        divergence = self.teacher.packed_divergence(self.actor_network, packed, self.kl_direction, *read)
        losses = {"loss_distill": divergence * tokens.weight}
        measured = {"kl_to_teacher": divergence.detach()}
        return MicroLoss(losses, measured, tokens.flat_index, tokens.sequence_index)

    def token_loss(
        self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None, flat_index: torch.Tensor
    ) -> MicroLoss:
        """Return the loss of `[num_tokens]` trained tokens, from their current log-probs."""
        pair = (log_probs, tokens["teacher_log_probs"])
        if self.kl_direction == "forward":
            pair = pair[::-1]
        divergence, is_clamped = kl_term(*pair, self.kl_estimator)
        losses = {"loss_distill": divergence * tokens.weight}
        measured = {"kl_to_teacher": divergence.detach(), "num_clamped_tokens": is_clamped.to(divergence.dtype)}
        return MicroLoss(losses, measured, flat_index, tokens.sequence_index)

    def output(self, losses: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> DistillationLossOutput:
        """Return the loss, and means over trained tokens."""
        return DistillationLossOutput(**losses, **summarized(measured))
