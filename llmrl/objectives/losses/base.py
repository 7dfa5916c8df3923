"""Base class of the losses: reads a batch, scores it in micro-batches and combines the results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl._utils.ranks import share_of
from llmrl.data.ragged import flat_batch, ragged_column
from llmrl.objectives.losses.aggregation import Aggregation, aggregation_weights
from llmrl.objectives.losses.inputs import LossInputs, MaskingStrategy, TokenInputs, at_least_float32, read_inputs
from llmrl.objectives.losses.outputs import LossOutput


@dataclass(slots=True)
class MicroLoss:
    """Contribution of one micro-batch to the batch's loss, per token."""

    losses: dict[str, torch.Tensor]
    """Weighted token losses by name (`loss_*`), `[num_tokens]`, with graph; the batch's loss is their sum."""
    measured: dict[str, torch.Tensor]
    """Measurements by name, `[num_tokens]`, detached."""
    flat_index: torch.Tensor
    """[num_tokens]: position of each token in the batch's concatenated rows."""
    sequence_index: torch.Tensor
    """[num_tokens]."""
    log_probs: torch.Tensor | None = None
    """[num_tokens]: log-probs of the policy before the update, detached."""
    is_repeated: bool = False
    """Whether another rank counts this micro-batch; its gradient is then zero on this rank."""

    def total(self) -> torch.Tensor:
        """Return the scalar to call `backward` on."""
        total = torch.stack([loss.sum() for loss in self.losses.values()]).sum()
        return total * 0.0 if self.is_repeated else total

    def detached(self) -> MicroLoss:
        """Return a copy without the graph."""
        return replace(self, losses={name: loss.detach() for name, loss in self.losses.items()})

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on `device`."""

        def moved(columns: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: column.to(device) for name, column in columns.items()}

        return replace(
            self,
            losses=moved(self.losses),
            measured=moved(self.measured),
            flat_index=self.flat_index.to(device),
            sequence_index=self.sequence_index.to(device),
            log_probs=None if self.log_probs is None else self.log_probs.to(device),
        )


class PackedTokens(Protocol):
    """Micro-batch as packed by a policy: the row and position of each scored token."""

    row_index: torch.Tensor
    """[num_scored] int64: row of each scored token."""
    token_index: torch.Tensor
    """[num_scored] int64: position of each scored token in its row."""


class LLMLoss(LossModule):
    """Base class of losses that are a weighted sum over the trained tokens of a batch.

    Token weights are computed from the whole batch, so losses of micro-batches of any size add up to the batch's loss.
    """

    actor_network: Any
    """`TransformersWrapper`, or any TensorDict module that writes log-probs (`[num_tokens]` per row)."""
    aggregation: Aggregation
    fixed_length: int | None = None
    masking_strategy: MaskingStrategy = "rlhf"
    needs_entropy: bool = False
    """Whether the entropy is a term of the loss."""

    @property
    def is_scalar(self) -> bool:
        """Whether the loss is a single number, as training requires."""
        return self.aggregation != "none"

    @property
    def measures_entropy(self) -> bool:
        """Whether the output includes the entropy: the loss uses it, or the policy provides it."""
        is_given = getattr(self.actor_network, "measures_entropy", False)
        return self.needs_entropy or is_given or "entropy" in getattr(self.actor_network, "out_keys", ())

    @abstractmethod
    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a whole batch and compute the weight of every trained token."""

    @property
    def _mask_keys(self) -> list[NestedKey]:
        """Entries that determine which tokens are trained."""
        keys: dict[MaskingStrategy, list[NestedKey]] = {
            "rlhf": [self.tensor_keys.assistant_mask],
            "sft": [("tokens", "prompt")],
            "generic": [],
        }
        return keys[self.masking_strategy]

    def _read(
        self,
        tensordict: TensorDictBase,
        token_columns: Mapping[str, NestedKey],
        row_columns: Mapping[str, NestedKey] | None = None,
    ) -> LossInputs:
        """Read a batch by the loss's own keys, masking strategy and device (`read_inputs`)."""
        return read_inputs(
            tensordict,
            tokens_key=self.tensor_keys.action,
            masking_strategy=self.masking_strategy,
            mask_key=self.tensor_keys.assistant_mask,
            token_columns=token_columns,
            row_columns=row_columns,
            device=self._device(),
        )

    def leave_out_idle_rows(self, inputs: LossInputs) -> None:
        """Exclude rows without gradient (by default none) from the computation; the weights of other tokens stay."""

    @abstractmethod
    def token_loss(
        self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None, flat_index: torch.Tensor
    ) -> MicroLoss:
        """Return the loss of `[num_tokens]` trained tokens of complete rows, from their current log-probs."""

    @abstractmethod
    def output(self, losses: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> LossOutput:
        """Return the batch's output from its reduced losses and its measurements, `[num_tokens]` each."""

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """Do nothing: there is no value estimator."""

    def _weighted(self, inputs: LossInputs) -> LossInputs:
        """Set the weight of every trained token."""
        is_scored = inputs.is_scored.to(inputs.sequence_index.device)
        weights = torch.zeros(is_scored.shape[0], device=is_scored.device)
        weights[is_scored] = aggregation_weights(
            inputs.sequence_index[is_scored],
            inputs.num_sequences,
            self.aggregation,
            fixed_length=self.fixed_length,
            group_of_sequence=inputs.group_of_sequence,
        )
        inputs.weights = weights
        return inputs

    def _device(self) -> torch.device | None:
        return next((parameter.device for parameter in self.parameters()), None)

    def micro_losses(
        self,
        inputs: LossInputs,
        tensordict: TensorDictBase,
        *,
        token_budget: int | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> Iterable[MicroLoss]:
        """Yield the losses of this rank's micro-batches; a policy that cannot pack rows has one micro-batch."""
        if self.actor_network is None:
            raise ValueError("The loss has no policy: pass actor_network.")
        if hasattr(self.actor_network, "packed_log_probs"):
            batches = self.actor_network.pack(
                inputs.token_ids, inputs.scored_masks, token_budget=token_budget, **inputs.replay
            )
            for packed, is_repeated in share_of(batches, rank, num_ranks):
                yield replace(self.packed_loss(inputs, packed), is_repeated=is_repeated)
        elif num_ranks > 1:
            raise ValueError("Only a policy that packs rows, such as TransformersWrapper, can split a batch by ranks.")
        else:
            yield self._plain_policy_loss(inputs, tensordict)

    def packed_loss(self, inputs: LossInputs, packed: PackedTokens) -> MicroLoss:
        """Return the loss of one packed micro-batch of `inputs`."""
        log_probs, entropy = self.actor_network.packed_log_probs(packed, return_entropy=self.measures_entropy)
        return self._micro_loss(inputs.tokens(packed.row_index, packed.token_index), log_probs, entropy)

    def _plain_policy_loss(self, inputs: LossInputs, tensordict: TensorDictBase) -> MicroLoss:
        """Return the loss from the log-probs and the entropy that a TensorDict module writes."""
        scored = self.actor_network(flat_batch(tensordict).copy())
        flat_index = inputs.is_scored.to(inputs.row_starts.device).nonzero()[:, 0]
        log_probs = at_least_float32(torch.cat(ragged_column(scored, self._log_probs_key))[flat_index])
        entropy = torch.cat(ragged_column(scored, "entropy"))[flat_index] if self.measures_entropy else None
        row_index = torch.searchsorted(inputs.row_starts, flat_index, right=True) - 1
        tokens = inputs.tokens(row_index, flat_index - inputs.row_starts[row_index])
        return self._micro_loss(tokens, log_probs, entropy)

    def _micro_loss(self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> MicroLoss:
        micro = self.token_loss(tokens, log_probs, entropy, tokens.flat_index)
        measured = micro.measured if entropy is None else {**micro.measured, "entropy": entropy.detach()}
        return replace(micro, measured=measured, log_probs=log_probs.detach())

    @property
    def _log_probs_key(self) -> NestedKey:
        """Entry under which a plain policy writes its log-probs."""
        return self.tensor_keys.log_probs

    def collect(self, micro_losses: Sequence[MicroLoss]) -> LossOutput:
        """Combine the micro-batches of one batch."""
        if not micro_losses:
            raise ValueError("The batch has no trained token: there is nothing to compute a loss from.")
        order = torch.cat([micro.flat_index for micro in micro_losses]).argsort()

        def joined(columns: Iterable[torch.Tensor]) -> torch.Tensor:
            return torch.cat(list(columns))[order]

        first = micro_losses[0]
        losses = {name: joined(micro.losses[name] for micro in micro_losses) for name in first.losses}
        measured = {name: joined(micro.measured[name] for micro in micro_losses) for name in first.measured}
        sequences = joined(micro.sequence_index for micro in micro_losses)
        return self.output({name: self._reduce(name, one, sequences) for name, one in losses.items()}, measured)

    def _reduce(self, name: str, losses: torch.Tensor, sequence_index: torch.Tensor) -> torch.Tensor:
        """Return the batch's loss from its weighted token losses in row order."""
        return losses.sum() if self.is_scalar else losses

    def forward(self, tensordict: TensorDictBase) -> LossOutput:
        """Return the loss of a whole batch, with its graph; raise KeyError or ValueError if the batch is invalid."""
        if not tensordict.batch_size.numel():
            raise ValueError("The batch has no row: there is nothing to compute a loss from.")
        inputs = self.prepare(tensordict)
        return self.collect(list(self.micro_losses(inputs, tensordict)))
