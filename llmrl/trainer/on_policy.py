"""Per-step check that trainer and engine give the same log-probs for tokens sampled by the current weights."""

from __future__ import annotations

import math
import warnings
from typing import Protocol

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.utils import NestedKey

from llmrl.data.ragged import flat_batch, has_entry, ragged_column
from llmrl.objectives.losses.base import LLMLoss
from llmrl.objectives.losses.streams import LOSS_WEIGHTS, StreamsLoss
from llmrl.trainer.trained_model import TrainedModel

_BOUNDS: dict[torch.dtype | None, float] = {torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest mean difference, in nats, that rounding explains; random models with sharp distributions reach half of it."""
_FLOAT32_BOUND = 0.001
_INT8_BOUND = 0.5
"""Upper limit of the bound for an int8 engine; beyond it most importance weights are clipped."""

_STALE = (
    "the engine does not hold the trainer's weights: an update did not reach it, or key-value blocks of old weights "
    "are in use (reset_running_requests=False)"
)
_COSTLY_INT8 = (
    "the engine computes in int8, and the rounding error is larger with these weights than with the first ones: start "
    "the engine without quantization"
)
_OTHER_DISTRIBUTION = [
    "the temperature of TransformersWrapper(generate_kwargs=...) differs from the sampler's",
    "top_k, top_p or min_p without the rows' sampling mask (replay=False), or a repetition penalty: the sampler's "
    "log-probs belong to another distribution",
    "the engine was started from another checkpoint than the trainer, or with other options of the model",
]


class SamplerKeys(Protocol):
    """Key names of the sampler's entries in a loss."""

    sample_log_prob: NestedKey
    policy_version: NestedKey


def sampled_tokens(
    loss_module: LLMLoss, batch: TensorDictBase, log_probs: list[torch.Tensor]
) -> tuple[TensorDictBase, list[torch.Tensor], SamplerKeys] | None:
    """Return the rows that a loss compares with their sampler, their log-probs, and the keys; None if there are none.

    With `StreamsLoss` these are the rows of the first such stream, with NaN for tokens without weight in it.
    """
    if hasattr(loss_module.tensor_keys, "policy_version"):
        return batch, log_probs, loss_module.tensor_keys
    if not isinstance(loss_module, StreamsLoss):
        return None
    for name, loss in loss_module.streams.items():
        key = (LOSS_WEIGHTS, name)
        found = [pair for pair in zip(flat_batch(batch).unbind(0), log_probs, strict=True) if has_entry(pair[0], key)]
        if found and hasattr(loss.tensor_keys, "policy_version"):
            rows = lazy_stack([row for row, _ in found])
            pairs = zip((values for _, values in found), ragged_column(rows, key), strict=True)
            return rows, [values.where(weights.cpu() != 0, torch.nan) for values, weights in pairs], loss.tensor_keys
    return None


def on_policy_difference(
    batch: TensorDictBase, log_probs: list[torch.Tensor], keys: SamplerKeys, version: int | None
) -> torch.Tensor:
    """Return `|log pi_trainer - log pi_sampler|` of the trained tokens that `version` sampled, `[num_tokens]`.

    Args:
        log_probs: log-probs of the policy, `[num_tokens]` per row; NaN for tokens that are not trained.
        version: version of the weights that gave `log_probs`; None selects all trained tokens.
    """
    rows = flat_batch(batch)
    ours = torch.cat(log_probs)
    sampler, versions = (
        torch.cat([column.reshape(-1) for column in ragged_column(rows, key)]).cpu()
        for key in (keys.sample_log_prob, keys.policy_version)
    )
    is_chosen = ~ours.isnan()
    if version is not None:
        is_chosen &= versions == version
    return (ours - sampler).abs()[is_chosen]


def check_difference(
    record: TrainedModel, batch: TensorDictBase, log_probs: list[torch.Tensor], keys: SamplerKeys
) -> dict[str, float]:
    """Return the mean on-policy difference and its bound as metrics, and warn if rounding does not explain it.

    The result is empty if no tokens are known to be on-policy: the weights were never sent to an engine, or have
    changed since. The warning is repeated if the difference doubles, or exceeds its bound again after a batch
    within the bound. For int8 engines the bound is twice the difference of the first batch, at most 0.5 nats.

    Raises ValueError for a difference above the bound if the engine was started with arguments that
    llmrl's tests do not cover, and its log-probs have not agreed before.
    """
    version = record.engine_version
    if record.num_updates or not has_entry(batch, keys.policy_version):
        return {}
    difference = on_policy_difference(batch, log_probs, keys, version)
    if difference.numel() < 2:
        return {}
    bound = _BOUNDS.get(record.coarsest_dtype, _FLOAT32_BOUND)
    mean = float(difference.mean())
    if version is None:  # the engine's initial weights may differ, for example if the trainer was resumed
        record.has_agreed |= mean <= bound
        return {}
    if record.is_engine_int8:  # the error of int8 depends on the model: 0.01 to 0.25 nats were observed
        if record.int8_difference is None:
            record.int8_difference = mean
        bound = max(bound, min(2 * record.int8_difference, _INT8_BOUND))
    measured = {"on_policy_difference": mean, "on_policy_difference_bound": bound}
    # With few tokens, the excess must be significant.
    if mean - 2 * float(difference.std()) / math.sqrt(difference.numel()) <= bound:
        record.has_agreed |= mean <= bound
        record.warned_difference = 0.0
        return measured
    if record.untested_arguments and not record.has_agreed:
        names = ", ".join(record.untested_arguments)
        raise ValueError(
            f"the engine was started with {names}, which llmrl's tests do not cover, and log-probs of the first batch "
            f"differ from the trainer's by {mean:.3g} nats on average; rounding explains {bound:g}. Start the engine "
            "without these arguments."
        )
    if mean < 2 * record.warned_difference:
        return measured
    record.warned_difference = mean
    causes = [_STALE, *_OTHER_DISTRIBUTION] if record.has_agreed else [*_OTHER_DISTRIBUTION, _STALE]
    if record.is_engine_int8:
        causes.insert(0, _COSTLY_INT8)
    if record.disagreement is not None:
        causes.insert(0, record.disagreement.removesuffix("."))
    listed = "\n".join(f"  {number}. {cause}" for number, cause in enumerate(causes, 1))
    warnings.warn(
        f"The trainer's log-probs differ by {mean:.3g} nats from those of the engine, on average over the "
        f"{difference.numel()} tokens that the current weights sampled; rounding explains {bound:g}. Likely causes, "
        f"the most likely first:\n{listed}",
        stacklevel=3,
    )
    return measured
