"""Log-probs of a batch under a model that is not being trained on it: the old policy, a reference, a teacher."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from llmrl.data.ragged import write_column
from llmrl.objectives.scoring import log_probs_of
from llmrl.trainer.trained_model import trained_model
from llmrl.trainer.transformers_wrapper import TransformersWrapper

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


@torch.no_grad()
def write_log_probs(
    policy: TransformersWrapper,
    batch: TensorDictBase,
    key: NestedKey,
    *,
    disable_adapter: bool = False,
    assistant_only: bool = True,
) -> TensorDictBase:
    """Write a policy's log-probs of the trained tokens under `key`, `[num_tokens]` float32 per row, without gradient.

    Where its model is sharded, every rank calls this with the same batch, computes its share and has all.

    - `("old_log_probs", "full")`: the trainer's own, before the first of several updates on a batch;
    - `("next", "ref_log_probs", "full")`: a reference's, a model of its own, or the trained one with its LoRA adapters
      off (`disable_adapter`), which costs no second copy of the weights;
    - `("next", "teacher_log_probs", "full")`: a teacher's.

    Args:
        policy: scores.
        batch: training rows, ragged; changed in place.
        key: entry written.
        disable_adapter: score with the adapters of a peft model disabled.
        assistant_only: score trained tokens; False scores all, as losses with `masking_strategy="generic"` need.

    Returns:
        The batch.

    Raises:
        TypeError: for `disable_adapter` with a model that has no adapters.
    """
    with adapters_off(policy.model) if disable_adapter else contextlib.nullcontext():
        group = trained_model(policy.model).process_group
        scored = log_probs_of(policy, batch, assistant_only=assistant_only, process_group=group)
    write_column(batch, key, scored)
    return batch


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel | PeftModel) -> Iterator[None]:
    """A peft model as it was before its adapters.

    Raises:
        TypeError: when the model has no adapters.
    """
    if not hasattr(model, "disable_adapter"):
        raise TypeError(
            f"disable_adapter needs a peft model, got {type(model).__name__}; score with a reference model instead."
        )
    with model.disable_adapter():
        yield
