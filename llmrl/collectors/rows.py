"""Conversion of rollouts to training rows, and of turns to a form that leaves the process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from llmrl.data import History, LogProbs, Masks, Rollout, Tokens
from llmrl.data.routed_experts import routed_experts_entry
from llmrl.data.sampling_mask import sampling_mask_entry
from llmrl.data.tensordicts import container_of, non_tensor, tensordict_of


class RowBytes(NamedTuple):
    """A training row for another process: bytes are pickled ten times faster than tensors."""

    columns: list[bytes]
    """Columns in the order of `_DTYPES`."""
    replayed: dict[str, TensorDictBase | torch.Tensor]
    """Optional entries: the sampling mask and the experts."""
    turn_starts: dict[int, int]
    counts: dict[str, int]
    """Counts of the rollout's reconciliation (`Reconciliation.counts`)."""


class _Row(NamedTuple):
    """`RowBytes` with tensors, within a process."""

    columns: list[torch.Tensor]
    replayed: dict[str, TensorDictBase | torch.Tensor]
    turn_starts: dict[int, int]
    counts: dict[str, int]


_DTYPES = {"token_ids": np.int64, "loss_mask": np.bool_, "log_probs": np.float32, "versions": np.int64}


def rollout_row_bytes(rollout: Rollout) -> list[RowBytes]:
    """Return a rollout's rows as bytes; `rollout_rows` converts them to tensors."""
    return [RowBytes([column.numpy().tobytes() for column in row.columns], *row[1:]) for row in _rows_of(rollout)]


def _rows_of(rollout: Rollout) -> list[_Row]:
    if rollout.row_bytes:
        return [_Row(list(map(_tensor_of, row.columns, _DTYPES.values())), *row[1:]) for row in rollout.row_bytes]
    if rollout.conversation is None:
        return []
    reconciled = rollout.conversation.reconcile()
    return [
        _Row(
            [torch.from_numpy(np.array(getattr(row.columns, name), dtype)) for name, dtype in _DTYPES.items()],
            {**sampling_mask_entry(row.columns.sampling_mask), **routed_experts_entry(row.columns.routed_experts)},
            row.turn_starts,
            reconciled.counts,
        )
        for row in reconciled.rows
    ]


def _tensor_of(column: bytes, dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(column), dtype))  # a writable copy


def rollout_rows(rollout: Rollout) -> list[TensorDictBase]:
    """Return a rollout's training rows: one, several if its history was rewritten, none if nothing was sampled.

    All rows contain the rollout's ids and its full reward. The data contract defines their keys.
    """
    rows: list[TensorDictBase] = []
    parts = _rows_of(rollout)
    for row_index, row in enumerate(parts):
        token_ids, loss_mask, log_probs, versions = row.columns
        numbers = {
            "sample_index": rollout.sample_index,
            "row_index": row_index,
            "num_rows": len(parts),
            "num_turns": rollout.num_turns,
            "status": int(rollout.status),
            "is_scored": rollout.is_scored,
            **row.counts,
        }
        identity = {
            "rollout_id": non_tensor(rollout.rollout_id),
            "group_id": non_tensor(rollout.group_id),
            "role": non_tensor(rollout.role),
            "reason": non_tensor(str(rollout.reason)),
            **{key: torch.full((), value) for key, value in numbers.items()},  # three times faster than torch.tensor
        }
        starts = [row.turn_starts.get(place, -1) for place in range(len(rollout.turn_rewards))]
        turns = {"reward": torch.tensor(rollout.turn_rewards), "start": torch.tensor(starts, dtype=torch.int64)}
        if rollout.turn_parents:
            turns["parent"] = torch.tensor(rollout.turn_parents, dtype=torch.int64)
        if rollout.token_rewards:
            turns["token_reward"] = _token_rewards(rollout, row.turn_starts, len(token_ids))
        breakdown = {name: torch.tensor([value]) for name, value in rollout.breakdown.items()}
        masks = {"all_attention_mask": torch.ones_like(loss_mask), "all_assistant_mask": loss_mask}
        rows.append(
            tensordict_of(
                {
                    "tokens": container_of(Tokens, {"full": token_ids}),
                    "masks": container_of(Masks, masks),
                    "log_probs": container_of(LogProbs, {"full": log_probs}),
                    "policy_versions": tensordict_of({"full": versions}),
                    **row.replayed,
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
    """Return the rewards of a row's tokens, `[num_tokens]`, without those of edited ends."""
    rewards = torch.zeros(num_tokens)
    order = sorted(starts.items(), key=lambda item: item[1])
    ends = [*(start for _, start in order[1:]), num_tokens]
    for (place, start), end in zip(order, ends, strict=True):
        dense = rollout.token_rewards.get(place, [])[: end - start]
        rewards[start : start + len(dense)] = torch.tensor(dense)
    return rewards


def portable_turn(step: TensorDictBase) -> TensorDictBase:
    """Return a copy of a turn to save or send: of its own size, without live objects."""
    return step.exclude(*_live_keys(step)).clone()


def _live_keys(step: TensorDictBase, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    keys: list[tuple[str, ...]] = []
    for key, value in step.items():
        if isinstance(value, NonTensorData) and not _is_plain(value.data):
            keys.append((*prefix, key))
        elif isinstance(value, TensorDict):
            keys += _live_keys(value, (*prefix, key))
    return keys


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return _is_plain([*value, *value.values()])
    return value is None or isinstance(value, (str, bytes, int, float))


def batch_rows(groups: Sequence[Sequence[Rollout]]) -> TensorDictBase | None:
    """Return the trainable rows of groups, lazily stacked, `[num_rows]`; None if there are none.

    Rollouts that were not scored or have no sampled tokens give no rows. In each row, `("rollout", "num_in_group")` is
    the number of rollouts of the group that have rows, which shows when a group is complete.
    """
    batch: list[TensorDictBase] = []
    for group in groups:
        rows_by_rollout = [rollout.rows or rollout_rows(rollout) for rollout in group if rollout.is_scored]
        num_in_group = torch.tensor(sum(map(bool, rows_by_rollout)))
        for row in itertools.chain(*rows_by_rollout):
            row.get("rollout").set("num_in_group", num_in_group)
            batch.append(row)
    return lazy_stack(batch, 0) if batch else None
