"""From settled rollouts to training rows, and to turns that may leave the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.data import History, LogProbs, Masks, Rollout, Tokens
from llmrl.data.routed_experts import routed_experts_entry
from llmrl.data.sampling_mask import sampling_mask_entry
from llmrl.data.tensordicts import container_of, non_tensor, tensordict_of


def rollout_rows(rollout: Rollout) -> list[TensorDictBase]:
    """Return a rollout's training rows: one, several where its history was rewritten, none where nothing was sampled.

    All rows carry the rollout's ids and its reward, undivided. Their keys are the data contract's.
    """
    if rollout.conversation is None:
        return []
    reconciled = rollout.conversation.reconcile()
    rows = []
    for row_index, row in enumerate(reconciled.rows):
        columns = row.columns
        token_ids = torch.tensor(columns.token_ids, dtype=torch.int64)
        loss_mask = torch.tensor(columns.loss_mask, dtype=torch.bool)
        identity = {
            "rollout_id": non_tensor(rollout.rollout_id),
            "group_id": non_tensor(rollout.group_id),
            "role": non_tensor(rollout.role),
            "sample_index": torch.tensor(rollout.sample_index),
            "row_index": torch.tensor(row_index),
            "num_rows": torch.tensor(len(reconciled.rows)),
            "num_turns": torch.tensor(rollout.num_turns),
            "status": torch.tensor(int(rollout.status)),
            "is_scored": torch.tensor(rollout.is_scored),
            "reason": non_tensor(rollout.reason),
            **{key: torch.tensor(value) for key, value in reconciled.counts.items()},
        }
        starts = [row.turn_starts.get(place, -1) for place in range(len(rollout.turn_rewards))]
        turns = {"reward": torch.tensor(rollout.turn_rewards), "start": torch.tensor(starts, dtype=torch.int64)}
        if rollout.token_rewards:
            turns["token_reward"] = _token_rewards(rollout, row.turn_starts, len(token_ids))
        breakdown = {name: torch.tensor([value]) for name, value in rollout.breakdown.items()}
        masks = {"all_attention_mask": torch.ones_like(loss_mask), "all_assistant_mask": loss_mask}
        log_probs = torch.tensor(columns.log_probs, dtype=torch.float32)
        versions = torch.tensor(columns.versions, dtype=torch.int64)
        rows.append(
            tensordict_of(
                {
                    "tokens": container_of(Tokens, {"full": token_ids}),
                    "masks": container_of(Masks, masks),
                    "log_probs": container_of(LogProbs, {"full": log_probs}),
                    "policy_versions": tensordict_of({"full": versions}),
                    **sampling_mask_entry(columns.sampling_mask),
                    **routed_experts_entry(columns.routed_experts),
                    "next": tensordict_of({"reward": torch.full((1, 1), float(rollout.reward))}),
                    "turns": tensordict_of(turns),
                    "reward_breakdown": tensordict_of(breakdown),
                    "rollout": tensordict_of(identity),
                    "history": tensordict_of({"full": History.from_chats(rollout.messages, check=False)}),
                }
            )
        )
    return rows


def _token_rewards(rollout: Rollout, starts: Mapping[int, int], num_tokens: int) -> torch.Tensor:
    """Return the rewards of a row's tokens, `[num_tokens]`; of an answer whose end was edited, those before."""
    rewards = torch.zeros(num_tokens)
    order = sorted(starts.items(), key=lambda item: item[1])
    ends = [*(start for _, start in order[1:]), num_tokens]
    for (place, start), end in zip(order, ends, strict=True):
        dense = rollout.token_rewards.get(place, [])[: end - start]
        rewards[start : start + len(dense)] = torch.tensor(dense)
    return rewards


def portable_turn(step: TensorDictBase) -> TensorDictBase:
    """Return a turn that can be saved or sent: cloned to its own size, without live objects.

    Left out is what lives with a conversation while it is played and is no plain data: its token state, which holds
    the renderer, its environment, the session of its tools.
    """
    return step.exclude(*_live_keys(step)).clone()


def _live_keys(step: TensorDictBase, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for key, value in step.items():
        if isinstance(value, NonTensorData):
            keys += [] if _is_plain(value.data) else [(*prefix, key)]
        elif isinstance(value, TensorDict):
            keys += _live_keys(value, (*prefix, key))
    return keys


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or isinstance(value, (str, bytes, int, float))


def batch_rows(groups: Sequence[Sequence[Rollout]]) -> TensorDictBase | None:
    """Return the trainable rows of these groups as one lazily stacked batch `[num_rows]`; None when there are none.

    A rollout that was not scored, or in which nothing was sampled, gives no row. Each row says how many rollouts of its
    group there are rows of, under `("rollout", "num_in_group")`: whoever puts groups together waits for so many.
    """
    batch: list[TensorDictBase] = []
    for group in groups:
        rows_by_rollout = [rollout.rows or rollout_rows(rollout) for rollout in group if rollout.is_scored]
        num_in_group = torch.tensor(sum(map(bool, rows_by_rollout)))
        for row in (row for rows in rows_by_rollout for row in rows):
            row.get("rollout").set("num_in_group", num_in_group)
            batch.append(row)
    return lazy_stack(batch, 0) if batch else None
