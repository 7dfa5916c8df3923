"""Several updates on one batch: epochs of mini-batches."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tensordict import TensorDictBase

from llmrl._utils.arguments import check_least
from llmrl.data.keys import LOSS_MASK_KEY
from llmrl.data.ragged import flat_batch
from llmrl.objectives.advantages.grouping import GroupKeys, grouped, stack_rows
from llmrl.objectives.losses.base import LLMLoss
from llmrl.objectives.losses.streams import StreamsLoss
from llmrl.trainer.scoring import write_log_probs


def minibatches(
    batch: TensorDictBase,
    loss_module: LLMLoss,
    *,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    seed: int,
) -> Iterator[TensorDictBase]:
    """Yield the batches of `num_epochs * num_minibatches` updates on one batch; for one update, the batch itself.

    If there are several updates, the policy's own log-probs are first written into the batch as
    `old_log_prob`, if the loss or one of its streams reads it, so that clipping bounds the updates
    together (PPO, arXiv:1707.06347, algorithm 1). The rows of a rollout stay in one mini-batch.
    Each epoch has its own order, in which groups stay together where possible.

    Args:
        batch: training rows with advantages; changed in place.
        loss_module: loss of the updates; its `actor_network` is the policy.
        num_minibatches: number of updates per epoch; limited to the number of rollouts.

    Raises ValueError if a number is below 1.

    Example:
        >>> from tensordict import TensorDict, lazy_stack
        >>> from llmrl.objectives import SFTLoss
        >>> rows = [TensorDict({"rollout": {"rollout_id": name, "group_id": "g"}}) for name in "aabc"]
        >>> parts = minibatches(lazy_stack(rows), SFTLoss(None), num_minibatches=3, seed=0)
        >>> sorted(sorted(part["rollout", "rollout_id"]) for part in parts)
        [['a', 'a'], ['b'], ['c']]
    """
    check_least(1, num_epochs=num_epochs, num_minibatches=num_minibatches)
    rows = flat_batch(batch)
    if num_epochs * num_minibatches == 1 or not rows.batch_size.numel():
        return iter([batch])
    _write_old_log_probs(loss_module, rows)
    return _parts(rows, num_epochs, num_minibatches, seed)


def _write_old_log_probs(loss_module: LLMLoss, rows: TensorDictBase) -> None:
    """Write the policy's log-probs under every `old_log_prob` that the loss, or a stream of it, reads."""
    losses = loss_module.streams.values() if isinstance(loss_module, StreamsLoss) else [loss_module]
    readers = [loss for loss in losses if hasattr(loss.tensor_keys, "old_log_prob")]
    # Losses that train on other tokens than those of the loss mask, as streams do, need the log-probs of all.
    assistant_only = all(
        loss.masking_strategy == "rlhf" and loss.tensor_keys.assistant_mask == LOSS_MASK_KEY for loss in readers
    )
    for key in dict.fromkeys(loss.tensor_keys.old_log_prob for loss in readers):
        write_log_probs(loss_module.actor_network, rows, key, assistant_only=assistant_only)


def _parts(rows: TensorDictBase, num_epochs: int, num_minibatches: int, seed: int) -> Iterator[TensorDictBase]:
    keys = GroupKeys()
    groups = grouped(rows.unbind(0), keys.group_id).values()
    for epoch in range(num_epochs):
        order = [list(grouped(group, keys.rollout_id).values()) for group in groups]
        generator = random.Random(f"{seed}/{epoch}")
        generator.shuffle(order)
        for group in order:
            generator.shuffle(group)
        rollouts = [rollout for group in order for rollout in group]
        num_parts = min(num_minibatches, len(rollouts))
        for part in range(num_parts):
            start, stop = (len(rollouts) * bound // num_parts for bound in (part, part + 1))
            yield stack_rows([row for rollout in rollouts[start:stop] for row in rollout])
