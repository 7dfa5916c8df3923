"""Group-relative policy optimization and its family."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl.data.packing import PackedRows
from llmrl.data.ragged import has_entry, ragged_column
from llmrl.objectives.aggregation import Aggregation, aggregation_weights
from llmrl.objectives.arguments import refuse_unknown
from llmrl.objectives.clipping import clip_bounds, clipped_importance, clipped_log_ratio, clipped_surrogate
from llmrl.objectives.inputs import LossInputs, MaskingStrategy, TokenInputs, read_inputs
from llmrl.objectives.kl import KLEstimator, kl_estimate
from llmrl.objectives.outputs import CISPOLossOutput, DAPOLossOutput, GRPOLossOutput, LLMLossOutput
from llmrl.objectives.ratios import (
    effective_sample_size,
    sequence_log_ratio,
    token_log_ratio,
    truncated_importance,
)


@dataclass(slots=True)
class MicroLoss:
    """What one micro-batch adds to the batch's loss, token by token."""

    losses: dict[str, torch.Tensor]
    """`loss_*`: `[num_tokens]` weighted token losses, with graph; the batch's loss is their sum."""
    measured: dict[str, torch.Tensor]
    """`[num_tokens]` detached."""
    flat_index: torch.Tensor
    """[num_tokens] place of each token among the batch's row tokens."""

    def total(self) -> torch.Tensor:
        """The scalar to call `backward` on."""
        return torch.stack([loss.sum() for loss in self.losses.values()]).sum()


class GRPOLoss(LossModule):
    """The clipped importance-weighted loss of GRPO (arXiv:2402.03300, equation 3), over trained tokens only.

    Names, keys and defaults are TorchRL's but for these: `entropy_bonus` is off (at a real vocabulary the bonus
    outweighs the objective), `masking_strategy` is `rlhf` (rows always carry the trained-token mask), averages leave
    prompts and padding out, and the parameters of the policy are its own, not functional copies.

    With one update a batch the old log-probs are the sampler's. For several updates, write the trainer's log-probs
    before the first under `old_log_prob` and set `importance_cap`: the ratio then is to those, and what separates
    trainer from sampler becomes a truncated weight (`truncated_importance`). With `importance_cap` and no old
    log-probs the current ones, detached, are the old ones, which is exact for the first update.

    GSPO is `ratio="sequence", aggregation="sequence_mean"`; Dr. GRPO is `aggregation="fixed_length"` with
    `MCAdvantage(normalization="mean")`.

    Args:
        actor_network: `TransformersWrapper`, or any TensorDict module that writes `sample_log_prob`'s entry with
            gradients (`[num_tokens]` a row).
        clip_epsilon: one bound or (low, high).
        kl_mask_threshold: tokens with `0.5 * (log pi - log pi_sampler)^2` above it are left out of the objective;
            they still count in the denominator, so that micro-batches stay exact.
        aggregation: see `aggregation_weights`; sequences are rollouts, whatever number of rows they have.
        fixed_length: for `aggregation="fixed_length"`.
        entropy_bonus, entropy_coeff: subtract `entropy_coeff * entropy`.
        kl_to_ref_coeff: add the KL to the reference, whose log-probs are read from `ref_log_probs`.
        kl_to_inference_coeff: add the KL to the sampler.
        kl_estimator: `k1`, `k2` or `k3`, see `kl_estimate`.
        ratio: `token`, or `sequence` (GSPO), a sequence being a row.
        importance_cap: truncation of the trainer-to-sampler weight.
        masking_strategy: `rlhf` trained-token mask, `sft` tokens after `("tokens", "prompt")`, `generic` all.

    Raises:
        TypeError: for an unknown keyword, naming the nearest.
        ValueError: for a value out of range.
    """

    output_type: type[LLMLossOutput] = GRPOLossOutput

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries that `set_keys` can rename."""

        advantage: NestedKey = "advantage"
        action: NestedKey = ("tokens", "full")
        sample_log_prob: NestedKey = ("log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")
        old_log_prob: NestedKey = ("old_log_probs", "full")
        assistant_mask: NestedKey = ("masks", "all_assistant_mask")

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: Aggregation = "token_mean",
        fixed_length: int | None = None,
        entropy_bonus: bool = False,
        entropy_coeff: float = 0.01,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: KLEstimator = "k3",
        ratio: Literal["token", "sequence"] = "token",
        importance_cap: float | None = None,
        masking_strategy: MaskingStrategy = "rlhf",
        **unknown: Any,
    ) -> None:
        super().__init__()
        refuse_unknown(
            type(self).__name__, unknown, set(inspect.signature(GRPOLoss.__init__).parameters) - {"self", "unknown"}
        )
        for name, value, choices in (
            ("aggregation", aggregation, get_args(Aggregation)),
            ("kl_estimator", kl_estimator, get_args(KLEstimator)),
            ("ratio", ratio, ("token", "sequence")),
            ("masking_strategy", masking_strategy, get_args(MaskingStrategy)),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {list(choices)}, got {value!r}.")
        # One sequence, to check the arguments now rather than at the first batch.
        aggregation_weights(torch.zeros(1, dtype=torch.int64), 1, aggregation, fixed_length=fixed_length)
        self.actor_network: Any = actor_network
        self.clip_epsilon_low, self.clip_epsilon_high = clip_bounds(clip_epsilon)
        self.kl_mask_threshold = kl_mask_threshold
        self.aggregation, self.fixed_length = aggregation, fixed_length
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.kl_estimator: KLEstimator = kl_estimator
        self.ratio, self.importance_cap = ratio, importance_cap
        self.masking_strategy: MaskingStrategy = masking_strategy

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from a batch."""
        keys = self.tensor_keys
        read = [keys.action, keys.sample_log_prob, keys.advantage]
        if self.masking_strategy == "rlhf":
            read.append(keys.assistant_mask)
        if self.masking_strategy == "sft":
            read.append(("tokens", "prompt"))
        return [*read, keys.ref_log_probs] if self.kl_to_ref_coeff is not None else read

    @property
    def out_keys(self) -> list[str]:
        """Fields of the output that are set."""
        keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS", "log_prob_difference_mean"]
        keys.append("log_prob_difference_max")
        if self.entropy_bonus:
            keys += ["entropy", "loss_entropy"]
        if self.kl_to_ref_coeff is not None:
            keys += ["loss_kl_to_ref", "kl_to_ref"]
        if self.kl_to_inference_coeff is not None:
            keys += ["loss_kl_to_inference", "kl_to_inference"]
        return keys

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        """Nothing to forward: there is no value estimator."""

    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a whole batch and give every trained token its share of the loss."""
        keys = self.tensor_keys
        inputs = read_inputs(
            tensordict,
            tokens_key=keys.action,
            sample_log_prob_key=keys.sample_log_prob,
            advantage_key=keys.advantage,
            masking_strategy=self.masking_strategy,
            mask_key=keys.assistant_mask,
            old_log_prob_key=keys.old_log_prob if has_entry(tensordict, keys.old_log_prob) else None,
            ref_log_prob_key=keys.ref_log_probs if self.kl_to_ref_coeff is not None else None,
            device=self._device(),
        )
        is_scored = inputs.is_scored.to(inputs.sequence_index.device)
        weights = torch.zeros(is_scored.shape[0], device=is_scored.device)
        weights[is_scored] = aggregation_weights(
            inputs.sequence_index[is_scored],
            inputs.num_sequences,
            self.aggregation,
            fixed_length=self.fixed_length,
        )
        inputs.weights = weights
        return inputs

    def _device(self) -> torch.device | None:
        parameter = next(iter(self.parameters()), None)
        return None if parameter is None else parameter.device

    def packed_loss(self, inputs: LossInputs, packed: PackedRows) -> MicroLoss:
        """The loss of one packed micro-batch of `inputs`."""
        log_probs, entropy = self.actor_network.packed_log_probs(packed, has_entropy=self.entropy_bonus)
        tokens = inputs.tokens(packed.row_index, packed.token_index)
        flat_index = inputs.row_starts[packed.row_index] + packed.token_index
        return self.token_loss(tokens, log_probs, entropy, flat_index)

    def token_loss(
        self,
        tokens: TokenInputs,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        flat_index: torch.Tensor,
    ) -> MicroLoss:
        """The loss of `[num_tokens]` trained tokens, from their current log-probs."""
        current, sampler = log_probs.detach(), tokens.sample_log_probs
        old = tokens.old_log_probs
        if old is None:
            old = sampler if self.importance_cap is None else current
        if self.ratio == "sequence":
            log_ratio = sequence_log_ratio(log_probs, old, tokens.row_index)
        else:
            log_ratio = token_log_ratio(log_probs, old)
        loss = self._policy_loss(log_ratio, log_probs, tokens.advantage)
        if self.importance_cap is not None:
            loss = loss * truncated_importance(old, sampler, self.importance_cap)
        if self.kl_mask_threshold is not None:
            loss = loss * (0.5 * (current - sampler).square() <= self.kl_mask_threshold)
        losses = {"loss_objective": loss * tokens.weight}
        measured = {
            "log_ratio": log_ratio.detach(),
            "is_clipped": self._is_clipped(log_ratio.detach()),
            "kl_approx": old - current,
            "difference": (current - sampler).abs(),
        }
        if self.entropy_bonus:
            assert entropy is not None
            losses["loss_entropy"] = -self.entropy_coeff * entropy * tokens.weight
            measured["entropy"] = entropy.detach()
        for name, coefficient, other in (
            ("kl_to_ref", self.kl_to_ref_coeff, tokens.ref_log_probs),
            ("kl_to_inference", self.kl_to_inference_coeff, sampler),
        ):
            if coefficient is not None:
                assert other is not None
                divergence = kl_estimate(log_probs, other, self.kl_estimator)
                losses[f"loss_{name}"] = coefficient * divergence * tokens.weight
                measured[name] = divergence.detach()
        return MicroLoss(losses, measured, flat_index)

    def _policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return clipped_surrogate(log_ratio, advantage, self.clip_epsilon_low, self.clip_epsilon_high)

    def _is_clipped(self, log_ratio: torch.Tensor) -> torch.Tensor:
        clipped = clipped_log_ratio(log_ratio, self.clip_epsilon_low, self.clip_epsilon_high)
        return (clipped != log_ratio).to(log_ratio.dtype)

    def collect(self, micro_losses: Sequence[MicroLoss]) -> LLMLossOutput:
        """Put the micro-batches of one batch together."""
        if not micro_losses:
            raise ValueError("The batch has no trained token: there is nothing to compute a loss of.")
        order = torch.cat([micro.flat_index for micro in micro_losses]).argsort()
        losses = {
            name: torch.cat([micro.losses[name] for micro in micro_losses])[order] for name in micro_losses[0].losses
        }
        measured = {
            name: torch.cat([micro.measured[name] for micro in micro_losses]) for name in micro_losses[0].measured
        }
        log_ratio, difference = measured.pop("log_ratio"), measured.pop("difference")
        means = {name: column.mean() for name, column in measured.items()}
        is_summed = self.aggregation != "none"
        return self.output_type(
            clip_fraction=means.pop("is_clipped"),
            ESS=effective_sample_size(log_ratio),
            log_prob_difference_mean=difference.mean(),
            log_prob_difference_max=difference.max() if difference.numel() else difference.mean(),
            **{name: loss.sum() if is_summed else loss for name, loss in losses.items()},
            **means,
        )

    def forward(self, tensordict: TensorDictBase) -> LLMLossOutput:
        """The loss of a batch of training rows, and measurements.

        The graph of the whole batch is held; `train_step` holds one micro-batch's at a time.

        Raises:
            KeyError: when an entry is missing.
            ValueError: for misaligned columns, or a batch without rows.
        """
        if not tensordict.batch_size.numel():
            raise ValueError("The batch has no row: there is nothing to compute a loss of.")
        inputs = self.prepare(tensordict)
        return self.collect(list(self.micro_losses(inputs, tensordict)))

    def micro_losses(
        self, inputs: LossInputs, tensordict: TensorDictBase, *, token_budget: int | None = None
    ) -> Iterable[MicroLoss]:
        """The losses of the batch's micro-batches, one after the other; a plain policy has a single one."""
        if self.actor_network is None:
            raise ValueError("The loss has no policy: give actor_network.")
        if hasattr(self.actor_network, "packed_log_probs"):
            for packed in self.actor_network.pack(inputs.token_ids, inputs.scored_masks, token_budget=token_budget):
                yield self.packed_loss(inputs, packed)
        else:
            yield self._plain_policy_loss(inputs, tensordict)

    def _plain_policy_loss(self, inputs: LossInputs, tensordict: TensorDictBase) -> MicroLoss:
        """The loss from the log-probs, and the entropy if asked, that any TensorDict module writes."""
        scored = self.actor_network(tensordict.copy())
        flat_index = inputs.is_scored.to(inputs.row_starts.device).nonzero()[:, 0]
        log_probs = torch.cat(ragged_column(scored, self.tensor_keys.sample_log_prob))[flat_index]
        entropy = torch.cat(ragged_column(scored, "entropy"))[flat_index] if self.entropy_bonus else None
        row_index = torch.searchsorted(inputs.row_starts, flat_index, right=True) - 1
        tokens = inputs.tokens(row_index, flat_index - inputs.row_starts[row_index])
        return self.token_loss(tokens, log_probs, entropy, flat_index)


class DAPO(GRPOLoss):
    """GRPO with Clip-Higher and the token mean (DAPO, arXiv:2503.14476, equations 8 and 10).

    The default bounds are the paper's, (0.2, 0.28); see `MCAdvantage` for its dynamic sampling (equation 11).
    """

    output_type = DAPOLossOutput

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        **arguments: Any,
    ) -> None:
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **arguments)


class CISPOLoss(GRPOLoss):
    """Clipped importance weights on log-probs (CISPO, arXiv:2506.13585, equations 4 and 5).

    Unlike TorchRL's, whose clipped tokens have no gradient, the weight is a constant and every token keeps its own.
    An `epsilon_low` of 1 leaves the weight without a lower bound, as in the paper.
    """

    output_type = CISPOLossOutput

    def _policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        return clipped_importance(log_ratio, log_probs, advantage, self.clip_epsilon_low, self.clip_epsilon_high)
