"""From settled rollouts to training rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.data import History, LogProbs, Masks, Rollout, Tokens


def rollout_rows(rollout: Rollout) -> list[TensorDictBase]:
    """The training rows of a rollout: one, or several where its history was rewritten; none where nothing was sampled.

    All rows carry the rollout's ids and its reward, undivided. Their keys are the data contract's.
    """
    if rollout.conversation is None:
        return []
    reconciled = rollout.conversation.reconcile()
    rows = []
    for row_index, row in enumerate(reconciled.rows):
        columns = row.columns
        token_ids = torch.tensor(columns.token_ids, dtype=torch.int64)
        is_trained = torch.tensor(columns.is_trained, dtype=torch.bool)
        rows.append(
            TensorDict(
                {
                    "tokens": Tokens(full=token_ids),
                    "masks": Masks(all_attention_mask=torch.ones_like(is_trained), all_assistant_mask=is_trained),
                    "log_probs": LogProbs(full=torch.tensor(columns.log_probs, dtype=torch.float32)),
                    "policy_versions": TensorDict({"full": torch.tensor(columns.versions, dtype=torch.int64)}),
                    "next": TensorDict({"reward": torch.full((1, 1), rollout.reward)}),
                    "reward_breakdown": TensorDict(
                        {name: torch.tensor([value]) for name, value in rollout.breakdown.items()}
                    ),
                    "rollout": TensorDict(
                        {
                            "rollout_id": NonTensorData(rollout.rollout_id),
                            "group_id": NonTensorData(rollout.group_id),
                            "sample_index": torch.tensor(rollout.sample_index),
                            "row_index": torch.tensor(row_index),
                            "num_rows": torch.tensor(len(reconciled.rows)),
                            "num_turns": torch.tensor(rollout.num_turns),
                            "status": torch.tensor(int(rollout.status)),
                            "is_scored": torch.tensor(rollout.is_scored),
                            "reason": NonTensorData(rollout.reason),
                            **{key: torch.tensor(value) for key, value in reconciled.counts.items()},
                        }
                    ),
                    "history": TensorDict({"full": History.from_chats(rollout.messages, check=False)}),
                }
            )
        )
    return rows


def batch_rows(rollouts: Sequence[Rollout]) -> TensorDictBase | None:
    """The trainable rows of these rollouts as one lazily stacked batch `[num_rows]`; None when there are none.

    A rollout that was not scored, or in which nothing was sampled, gives no row.
    """
    rows = [row for rollout in rollouts if rollout.is_scored for row in rollout.rows or rollout_rows(rollout)]
    return lazy_stack(rows, 0) if rows else None
