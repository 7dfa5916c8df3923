"""`BatchSource`: the batches of training steps, with the state needed to train on them again after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypedDict

import torch
from tensordict import TensorDict, TensorDictBase

from llmrl._utils.types import JSON, StateDict
from llmrl.collectors import CollectionReport
from llmrl.collectors.base import BatchCollector
from llmrl.collectors.rows import rollout_rows
from llmrl.data import Rollout
from llmrl.data.ragged import has_entry, value_column
from llmrl.runs.read_ahead import ReadAhead
from llmrl.runs.run_folder import random_states, restore_random_states
from llmrl.watch.rollout_metrics import metrics_by_env, rollout_metrics, rollout_records
from llmrl.watch.token_log import TOKEN_KEYS

_ROLLOUT_ID = ("rollout", "rollout_id")


class BatchMaker(Protocol):
    """The interface of `LLMCollector` that a run uses."""

    report: CollectionReport | None
    rollouts: list[Rollout]

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        """Yield batches."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that play the next batch."""

    def update_policy_weights_(self, model: torch.nn.Module, /) -> int:
        """Send the trainer's weights to the engines."""

    def state_dict(self) -> StateDict:
        """Return the position in the data."""

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the position in the data."""


class SavedBatch(TypedDict):
    """The data that a step collected, saved before the step trains on it."""

    batch: TensorDictBase
    """Training rows."""
    metrics: dict[str, float]
    """Metrics of the collection."""
    rollouts: list[dict[str, JSON]]
    """Records of the rollouts (`rollout_records`)."""
    dropped_rows: list[TensorDictBase]
    """Token columns (`TOKEN_KEYS`) of the rollouts that are not in the batch."""
    collector: StateDict
    """State of the collector after the batch. It includes the groups in flight, which are played again."""
    random: StateDict
    """States of the random number generators after the batch."""


class BatchSource:
    """Batches of a collector, each with the state of the collector after the batch.

    Args:
        in_background: draw batches in a thread; `take` then returns an empty batch if none is ready.
        needs_batch: callable that returns whether the step must wait for a batch; used only with `in_background`.
        last: last batch that was taken before a resumption.
        on_dropped: callable that receives the metrics and rollouts if no row of a batch can be trained on, before
            another batch is collected in its place. Not used with `in_background`.
    """

    def __init__(
        self,
        collector: BatchMaker,
        *,
        in_background: bool,
        needs_batch: Callable[[], bool],
        last: SavedBatch | None,
        on_dropped: Callable[[dict[str, float], Sequence[Rollout]], object],
    ) -> None:
        self.collector = collector
        self._needs_batch = needs_batch
        self._last = last
        self._batches = self._draw()
        self._ahead = ReadAhead(self._batches) if in_background else None
        if isinstance(collector, BatchCollector) and not in_background:
            collector.on_empty_batch = lambda: on_dropped(*played_by(collector))

    def _draw(self) -> Iterator[SavedBatch]:
        for batch in self.collector:
            metrics, played = played_by(self.collector)
            assert batch is not None
            yield {
                "batch": batch,
                "metrics": metrics,
                "rollouts": rollout_records(played),
                "dropped_rows": token_rows(left_out(played, batch)),
                "collector": self.collector.state_dict(),
                "random": random_states(),
            }

    def take(self) -> SavedBatch | None:
        """Return the batch of the next step, or None at the end of the data."""
        started = time.perf_counter()
        if self._ahead is None:
            collected = next(self._batches, None)
        else:
            last = self._last
            collected = self._ahead.take(wait=last is None or self._needs_batch())
            if collected is None and last is not None and not self._ahead.is_at_end:
                collected = {
                    "batch": TensorDict(batch_size=[0]),
                    "metrics": {},
                    "rollouts": [],
                    "dropped_rows": [],
                    "collector": last["collector"],
                    "random": random_states(),
                }
        if collected is not None:
            collected["metrics"]["generate_seconds"] = time.perf_counter() - started
            self._last = collected
        return collected

    def close(self) -> None:
        """Stop drawing batches."""
        if self._ahead is not None:
            self._ahead.close()


def played_by(collector: BatchMaker) -> tuple[dict[str, float], list[Rollout]]:
    """Return the metrics and the rollouts of the collector's last batch."""
    report = collector.report
    played = collector.rollouts
    assert report is not None
    return report.to_metrics() | rollout_metrics(played) | metrics_by_env(played), played


def left_out(played: Sequence[Rollout], batch: TensorDictBase) -> list[Rollout]:
    """Return the rollouts without a row in the batch, or none if the rows do not name their rollouts."""
    if not batch.batch_size.numel() or not has_entry(batch, _ROLLOUT_ID):
        return []
    held = set(value_column(batch, _ROLLOUT_ID))
    return [rollout for rollout in played if rollout.rollout_id not in held]


def token_rows(rollouts: Sequence[Rollout]) -> list[TensorDictBase]:
    """Return the token columns (`TOKEN_KEYS`) of the rows of rollouts."""
    rows = [row for rollout in rollouts for row in rollout.rows or rollout_rows(rollout)]
    return [row.select(*TOKEN_KEYS) for row in rows]


def restore(collector: BatchMaker, collected: SavedBatch | StateDict) -> None:
    """Restore the collector and the random number generators from a saved batch or a checkpoint."""
    collector.load_state_dict(collected["collector"])
    restore_random_states(collected["random"])
