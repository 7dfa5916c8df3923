"""From settled rollouts to training rows, and to turns that may leave the process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.data import History, LogProbs, Masks, Rollout, Tokens
from llmrl.data.routed_experts import routed_experts_entry
from llmrl.data.sampling_mask import sampling_mask_entry
from llmrl.data.tensordicts import container_of, non_tensor, tensordict_of


class PackedRow(NamedTuple):
    """A training row as it travels: its columns as bytes, which take a tenth of the time that its tensors would."""

    token_ids: bytes
    loss_mask: bytes
    log_probs: bytes
    versions: bytes
    replayed: dict[str, TensorDictBase | torch.Tensor]
    """Entries that few rows have: the sampling mask, the experts."""
    turn_starts: dict[int, int]
    counts: dict[str, int]
    """How the rollout's rows came about, see `Reconciliation`."""


def pack_rows(rollout: Rollout) -> list[PackedRow]:
    """Return what `rollout_rows` makes a rollout's rows of, when its conversation stays behind."""
    if rollout.conversation is None:
        return []
    reconciled = rollout.conversation.reconcile()
    return [
        PackedRow(
            np.array(columns.token_ids, dtype=np.int64).tobytes(),
            np.array(columns.loss_mask, dtype=np.bool_).tobytes(),
            np.array(columns.log_probs, dtype=np.float32).tobytes(),
            np.array(columns.versions, dtype=np.int64).tobytes(),
            {**sampling_mask_entry(columns.sampling_mask), **routed_experts_entry(columns.routed_experts)},
            row.turn_starts,
            reconciled.counts,
        )
        for row in reconciled.rows
        for columns in (row.columns,)
    ]


def rollout_rows(rollout: Rollout) -> list[TensorDictBase]:
    """Return a rollout's training rows: one, several where its history was rewritten, none where nothing was sampled.

    All rows carry the rollout's ids and its reward, undivided. Their keys are the data contract's.
    """
    packed_rows: list[PackedRow] = rollout.packed_rows or pack_rows(rollout)
    rows: list[TensorDictBase] = []
    for row_index, packed in enumerate(packed_rows):
        token_ids, loss_mask, log_probs, versions = (
            torch.frombuffer(bytearray(column), dtype=dtype)
            for column, dtype in zip(packed[:4], (torch.int64, torch.bool, torch.float32, torch.int64), strict=True)
        )
        numbers = {
            "sample_index": rollout.sample_index,
            "row_index": row_index,
            "num_rows": len(packed_rows),
            "num_turns": rollout.num_turns,
            "status": int(rollout.status),
            "is_scored": rollout.is_scored,
            **packed.counts,
        }
        identity = {
            "rollout_id": non_tensor(rollout.rollout_id),
            "group_id": non_tensor(rollout.group_id),
            "role": non_tensor(rollout.role),
            "reason": non_tensor(rollout.reason),
            **{key: torch.full((), value) for key, value in numbers.items()},  # a third of what torch.tensor takes
        }
        starts = [packed.turn_starts.get(place, -1) for place in range(len(rollout.turn_rewards))]
        turns = {"reward": torch.tensor(rollout.turn_rewards), "start": torch.tensor(starts, dtype=torch.int64)}
        if rollout.token_rewards:
            turns["token_reward"] = _token_rewards(rollout, packed.turn_starts, len(token_ids))
        breakdown = {name: torch.tensor([value]) for name, value in rollout.breakdown.items()}
        masks = {"all_attention_mask": torch.ones_like(loss_mask), "all_assistant_mask": loss_mask}
        rows.append(
            tensordict_of(
                {
                    "tokens": container_of(Tokens, {"full": token_ids}),
                    "masks": container_of(Masks, masks),
                    "log_probs": container_of(LogProbs, {"full": log_probs}),
                    "policy_versions": tensordict_of({"full": versions}),
                    **packed.replayed,
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
    """Return the rewards of a row's tokens, `[num_tokens]`; if the end of an answer was edited, those before it."""
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

    A rollout that was not scored, or in which nothing was sampled, gives no row. Each row has the number of rollouts of
    its group that have rows, under `("rollout", "num_in_group")`: a reader that assembles groups waits for that many.
    """
    batch: list[TensorDictBase] = []
    for group in groups:
        rows_by_rollout = [rollout.rows or rollout_rows(rollout) for rollout in group if rollout.is_scored]
        num_in_group = torch.tensor(sum(map(bool, rows_by_rollout)))
        for row in (row for rows in rows_by_rollout for row in rows):
            row.get("rollout").set("num_in_group", num_in_group)
            batch.append(row)
    return lazy_stack(batch, 0) if batch else None
