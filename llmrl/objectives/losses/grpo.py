"""Group-relative policy optimization, DAPO and CISPO."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_args

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey
from torchrl.objectives.common import LossModule

from llmrl._utils.arguments import check_choice, check_not_negative, refuse_unknown
from llmrl._utils.other_libraries import instead_of
from llmrl.objectives.kl import KLEstimator, kl_term
from llmrl.objectives.losses.aggregation import Aggregation, aggregation_weights
from llmrl.objectives.losses.base import LLMLoss, MicroLoss
from llmrl.objectives.losses.clipping import clip_bounds, clipped_importance, clipped_log_ratio, clipped_surrogate
from llmrl.objectives.losses.inputs import LossInputs, MaskingStrategy, TokenInputs, has_column
from llmrl.objectives.losses.outputs import CISPOLossOutput, DAPOLossOutput, GRPOLossOutput, LLMLossOutput, summarized
from llmrl.objectives.ratios import (
    ImportanceBound,
    bounded_exp,
    effective_sample_size,
    is_out_of_range,
    sequence_log_ratio,
    token_log_ratio,
)


class GRPOLoss(LLMLoss):
    """Clipped importance-weighted policy loss of GRPO (arXiv:2402.03300, equation 3) over trained tokens.

    Names, keys and defaults are TorchRL's, except that `entropy_bonus` is off unless `entropy_coeff` is given,
    `masking_strategy` is `rlhf`, averages exclude prompts and padding, and parameters are not copied.

    The ratio is to `old_log_prob` if the batch has it (`write_log_probs`), otherwise to the sampler's log-probs, as in
    TorchRL. With `importance_cap` a bounded weight corrects for the sampler (`importance_weights`), and the ratio is
    to the trainer's log-probs: `old_log_prob`, or the current ones, detached. In this case several updates on a batch
    require `old_log_prob`, written once before the first; without it each ratio is 1 and no token is clipped.

    Args:
        actor_network: `TransformersWrapper`, or any TensorDict module that writes
            `sample_log_prob`'s entry with gradients (`[num_tokens]` per row).
        clip_epsilon: one bound for both sides, or `(low, high)`.
        dual_clip: bound above 1 on the ratio where the advantage is negative (`clipped_surrogate`).
        kl_mask_threshold: largest `0.5 * (log pi - log pi_sampler)^2` of tokens that stay in the objective.
        max_staleness: largest number of versions between the policy that sampled a token and the current one; older
            tokens are excluded. The current version is `self.policy_version`, or if None the newest in the batch.
        aggregation: method of `aggregation_weights`; a sequence is a rollout with all its rows.
            Excluded tokens still count in the denominator, so that micro-batches add up.
        fixed_length: sequence length for `aggregation="fixed_length"`; refused with another aggregation.
        entropy_bonus, entropy_coeff: whether to subtract `entropy_coeff * entropy`, and the
            coefficient (default 0.01); a given coefficient implies the bonus.
        kl_to_ref_coeff: coefficient of the KL to the reference, with log-probs read from `ref_log_probs`.
        kl_to_inference_coeff: coefficient of the KL to the sampler.
        kl_estimator: `k1`, `k2` or `k3` (`kl_estimate`); `KLPenalty` puts the KL into the reward instead.
        importance_cap: upper bound of each token's trainer-to-sampler weight, or an `ImportanceBound`, which can also
            mask tokens or weight sequences; a sequence is a row here.
        masking_strategy: trained tokens: `rlhf` the loss mask, `sft` those after `("tokens", "prompt")`, `generic` all.
    """

    output_type: type[LLMLossOutput] = GRPOLossOutput
    _is_around_sampler = False
    """Whether clipped tokens are excluded, with clip bounds relative to the sampler's policy (DPPO)."""
    _has_sequence_ratio = False
    """Whether the ratio is that of a row (GSPO), not of each token."""

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Entries that `set_keys` can rename."""

        advantage: NestedKey = "advantage"
        action: NestedKey = ("tokens", "full")
        sample_log_prob: NestedKey = ("log_probs", "full")
        ref_log_probs: NestedKey = ("next", "ref_log_probs", "full")
        old_log_prob: NestedKey = ("old_log_probs", "full")
        policy_version: NestedKey = ("policy_versions", "full")
        assistant_mask: NestedKey = ("masks", "all_assistant_mask")

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        dual_clip: float | None = None,
        kl_mask_threshold: float | None = None,
        max_staleness: int | None = None,
        aggregation: Aggregation = "token_mean",
        fixed_length: int | None = None,
        entropy_bonus: bool | None = None,
        entropy_coeff: float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        kl_estimator: KLEstimator = "k3",
        importance_cap: float | ImportanceBound | None = None,
        masking_strategy: MaskingStrategy = "rlhf",
        **unknown: object,
    ) -> None:
        super().__init__()
        known = set(inspect.signature(GRPOLoss.__init__).parameters) - {"self", "unknown"}
        refuse_unknown(type(self).__name__, unknown, known, instead_of("GRPOLoss"))
        check_choice(get_args(KLEstimator), kl_estimator=kl_estimator)
        check_choice(get_args(MaskingStrategy), masking_strategy=masking_strategy)
        check_not_negative(
            kl_mask_threshold=kl_mask_threshold,
            max_staleness=max_staleness,
            entropy_coeff=entropy_coeff,
            kl_to_ref_coeff=kl_to_ref_coeff,
            kl_to_inference_coeff=kl_to_inference_coeff,
        )
        if dual_clip is not None and not dual_clip > 1:
            raise ValueError(f"dual_clip must be above 1, got {dual_clip}.")
        if fixed_length is not None and aggregation != "fixed_length":
            raise ValueError(
                f"fixed_length={fixed_length} has no effect with aggregation={aggregation!r}: "
                "use aggregation='fixed_length', or leave fixed_length out."
            )
        # Raises ValueError for invalid arguments now rather than at the first batch.
        aggregation_weights(torch.zeros(1, dtype=torch.int64), 1, aggregation, fixed_length=fixed_length)
        if importance_cap is not None and not isinstance(importance_cap, ImportanceBound):
            importance_cap = ImportanceBound(importance_cap)
        self.actor_network = actor_network
        self.clip_epsilon_low, self.clip_epsilon_high = clip_bounds(clip_epsilon)
        self.dual_clip = dual_clip
        self.kl_mask_threshold = kl_mask_threshold
        self.max_staleness = max_staleness
        self.aggregation = aggregation
        self.fixed_length = fixed_length
        if entropy_bonus is None:
            entropy_bonus = entropy_coeff is not None
        self.entropy_bonus = entropy_bonus
        self.needs_entropy = entropy_bonus
        self.entropy_coeff = 0.01 if entropy_coeff is None else entropy_coeff
        self.kl_to_ref_coeff = kl_to_ref_coeff or None
        self.kl_to_inference_coeff = kl_to_inference_coeff
        self.kl_estimator: KLEstimator = kl_estimator
        self.importance = importance_cap
        self.masking_strategy: MaskingStrategy = masking_strategy
        self.policy_version: int | None = None
        """Version being trained, for `max_staleness`."""

    @property
    def _leaves_tokens_out(self) -> bool:
        is_masked = self.importance is not None and self.importance.mode == "mask"
        return is_masked or self.kl_mask_threshold is not None or self.max_staleness is not None

    @property
    def in_keys(self) -> list[NestedKey]:
        """Entries read from a batch."""
        keys = self.tensor_keys
        read = [keys.action, keys.sample_log_prob, keys.advantage]
        read += self._mask_keys
        if self.max_staleness is not None:
            read.append(keys.policy_version)
        if self.kl_to_ref_coeff is not None:
            read.append(keys.ref_log_probs)
        return read

    @property
    def out_keys(self) -> list[str]:
        """Fields of the output that are set."""
        keys = ["loss_objective", "ratio", "clip_fraction", "kl_approx", "ESS"]
        keys += ["log_prob_difference_mean", "log_prob_difference_max", "num_clamped_tokens"]
        if self.measures_entropy:
            keys.append("entropy")
        if self.entropy_bonus:
            keys.append("loss_entropy")
        if self.kl_to_ref_coeff is not None:
            keys += ["loss_kl_to_ref", "kl_to_ref"]
        if self.kl_to_inference_coeff is not None:
            keys += ["loss_kl_to_inference", "kl_to_inference"]
        if self.importance is not None:
            keys += ["importance_weight", "importance_clip_fraction"]
        if self.max_staleness is not None:
            keys.append("staleness")
        if self._leaves_tokens_out:
            keys.append("masked_fraction")
        return keys

    @property
    def _log_probs_key(self) -> NestedKey:
        return self.tensor_keys.sample_log_prob

    def prepare(self, tensordict: TensorDictBase) -> LossInputs:
        """Read a whole batch and compute the weight of every trained token."""
        keys = self.tensor_keys
        token_columns = {"sample_log_probs": keys.sample_log_prob}
        if has_column(tensordict, keys.old_log_prob):
            token_columns["old_log_probs"] = keys.old_log_prob
        if self.kl_to_ref_coeff is not None:
            token_columns["ref_log_probs"] = keys.ref_log_probs
        if self.max_staleness is not None:
            token_columns["policy_versions"] = keys.policy_version
        inputs = self._read(tensordict, token_columns, {"advantage": keys.advantage})
        if self.max_staleness is not None:
            versions = inputs.columns.pop("policy_versions")
            newest: int | torch.Tensor = versions.max()
            if self.policy_version is not None:
                newest = self.policy_version
            inputs.columns["staleness"] = (newest - versions).float()
        return self._weighted(inputs)

    def leave_out_idle_rows(self, inputs: LossInputs) -> None:
        """Exclude rows with zero advantage if the policy loss is the only loss term."""
        if self.entropy_bonus or self.kl_to_ref_coeff is not None or self.kl_to_inference_coeff is not None:
            return
        advantages = inputs.columns["advantage"].split([len(ids) for ids in inputs.token_ids])
        masks = zip(inputs.scored_masks, advantages, strict=True)
        inputs.scored_masks = [mask & bool(advantage[mask].any()) for mask, advantage in masks]

    def token_loss(
        self, tokens: TokenInputs, log_probs: torch.Tensor, entropy: torch.Tensor | None, flat_index: torch.Tensor
    ) -> MicroLoss:
        """Return the loss of `[num_tokens]` trained tokens, from their current log-probs."""
        current = log_probs.detach()
        sampler = tokens["sample_log_probs"]
        # The trainer's log-probs before the first update on the batch.
        own = tokens.columns.get("old_log_probs", current)
        is_to_own = self.importance is not None or ("old_log_probs" in tokens and not self._is_around_sampler)
        old = own if is_to_own else sampler
        if self._has_sequence_ratio:
            log_ratio = sequence_log_ratio(log_probs, old, tokens.row_index)
        else:
            log_ratio = token_log_ratio(log_probs, old)
        log_weight = log_ratio.detach()
        is_clipped = self._is_clipped(log_weight, current, sampler, tokens["advantage"])
        measured = {
            "ratio": bounded_exp(log_weight),
            "clip_fraction": is_clipped.to(current.dtype),
            "kl_approx": old - current,
            "difference": (own - sampler).abs(),
        }
        is_clamped = is_out_of_range(log_weight)
        weight: torch.Tensor | float = 1.0
        is_kept = torch.ones_like(current, dtype=torch.bool)
        if self.importance is not None:
            log_mismatch = self.importance.log_weights(old, sampler, tokens.row_index)
            weight = self.importance.bounded(log_mismatch)
            measured["importance_weight"] = weight
            measured["importance_clip_fraction"] = (weight != bounded_exp(log_mismatch)).to(current.dtype)
            log_weight = log_weight + log_mismatch
            is_clamped |= is_out_of_range(log_mismatch)
            if self.importance.mode == "mask":
                is_kept &= weight > 0
        if self.kl_mask_threshold is not None:
            is_kept &= 0.5 * (current - sampler).square() <= self.kl_mask_threshold
        if self.max_staleness is not None:
            measured["staleness"] = tokens["staleness"]
            is_kept &= tokens["staleness"] <= self.max_staleness
        if self._leaves_tokens_out:
            measured["masked_fraction"] = (~is_kept).to(current.dtype)
        if self._is_around_sampler:
            is_kept &= ~is_clipped
        # Multiplication with 0 alone would not remove NaN and infinity.
        log_ratio = torch.where(is_kept, log_ratio, 0.0)
        kept_log_probs = torch.where(is_kept, log_probs, 0.0)
        loss = self.policy_loss(log_ratio, kept_log_probs, tokens["advantage"]) * weight * is_kept
        losses = {"loss_objective": loss * tokens.weight}
        if self.entropy_bonus:
            assert entropy is not None
            losses["loss_entropy"] = -self.entropy_coeff * entropy * tokens.weight
        for name, coefficient, column in (
            ("kl_to_ref", self.kl_to_ref_coeff, "ref_log_probs"),
            ("kl_to_inference", self.kl_to_inference_coeff, "sample_log_probs"),
        ):
            if coefficient is not None:
                divergence, is_beyond = kl_term(log_probs, tokens[column], self.kl_estimator)
                losses[f"loss_{name}"] = coefficient * divergence * tokens.weight
                measured[name] = divergence.detach()
                is_clamped |= is_beyond
        measured |= {"log_weight": log_weight, "num_clamped_tokens": is_clamped.to(current.dtype)}
        return MicroLoss(losses, measured, flat_index, tokens.sequence_index)

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return the policy loss of each trained token, `[num_tokens]`; override it for another objective.

        All arguments are `[num_tokens]`; `log_ratio` (current to old policy) and `log_probs` have gradients.
        """
        return clipped_surrogate(
            log_ratio, advantage, self.clip_epsilon_low, self.clip_epsilon_high, dual_clip=self.dual_clip
        )

    def _is_clipped(
        self, log_ratio: torch.Tensor, log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, advantage: torch.Tensor
    ) -> torch.Tensor:
        """Return whether each token's update is clipped, `[num_tokens]` bool; arguments are detached."""
        return clipped_log_ratio(log_ratio, self.clip_epsilon_low, self.clip_epsilon_high) != log_ratio

    def output(self, losses: dict[str, torch.Tensor], measured: dict[str, torch.Tensor]) -> LLMLossOutput:
        """Return the losses, and means over trained tokens."""
        log_weight = measured.pop("log_weight")
        difference = measured.pop("difference")
        return self.output_type(
            ESS=effective_sample_size(log_weight),
            log_prob_difference_mean=difference.mean(),
            log_prob_difference_max=difference.max() if difference.numel() else difference.mean(),
            **losses,
            **summarized(measured),
        )


class DAPO(GRPOLoss):
    """GRPO with Clip-Higher (the paper's bounds) and the token mean (DAPO, arXiv:2503.14476, equations 8 and 10)."""

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

    The weight is a constant, so clipped tokens keep their gradient, unlike in TorchRL. There is no lower bound by
    default (`epsilon_low` of 1), as in the paper's experiments (section 3.1). The paper does not state its upper
    bound; the default here limits the weight to 5. Keywords are those of `GRPOLoss` except `dual_clip`.
    """

    output_type = CISPOLossOutput

    def __init__(
        self,
        actor_network: TensorDictModuleBase | None = None,
        *,
        clip_epsilon: float | tuple[float, float] = (1.0, 4.0),
        **arguments: Any,
    ) -> None:
        if "dual_clip" in arguments:
            raise TypeError("CISPOLoss has no argument 'dual_clip': use clip_epsilon to bound the weights.")
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **arguments)

    def policy_loss(self, log_ratio: torch.Tensor, log_probs: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        """Return the policy loss of each trained token, `[num_tokens]`."""
        return clipped_importance(log_ratio, log_probs, advantage, self.clip_epsilon_low, self.clip_epsilon_high)
