"""Scheduler that keeps rollouts in flight, counts groups and forms batches.

The unit is one rollout: no turn waits for another rollout. The only clock is the event loop's, so a
loop with virtual time can simulate a cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from llmrl._utils.arguments import check_least
from llmrl._utils.failure import as_exception, cancel_this_task, describe, traceback_of
from llmrl.collectors.gates import Gate
from llmrl.collectors.groups import (
    SIGNAL_PATIENCE,
    CollectionStalled,
    Dropped,
    DropReason,
    GroupCounter,
    GroupRules,
    NoSignal,
    StallDetector,
)
from llmrl.data import Rollout, RolloutStatus, StopReason

_VERSION_POLL_SECONDS = 0.05
_STOP_SECONDS = 30.0


@dataclass(slots=True, kw_only=True)
class RolloutTask:
    """Unit of play: one rollout, or a whole group for a remote actor."""

    records: list[Rollout]
    """The rollouts so far; `play` fills or replaces them."""
    payload: Any = None
    """Input of the source's `play`: the opening of a rollout, or positions in the dataset."""
    positions: tuple[int, ...] = ()
    """Positions of the rollouts in the dataset."""


class RolloutSource(Protocol):
    """Source that opens groups of rollouts and plays them."""

    group_size: int
    """Number of rollouts per group."""

    @property
    def policy_version(self) -> int:
        """Version of the weights that a rollout started now would use."""

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Draw groups, each as the jobs of its rollouts; fewer if the data ends."""

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play a job to its end; a rollout's failure is recorded in its status."""

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Score a settled group together, if its rubric does so."""


@dataclass(slots=True, kw_only=True)
class ReadyBatch:
    """Groups of one batch, before it is assembled."""

    groups: list[list[Rollout]]
    staleness: list[int]
    """Number of versions between each group's start and its delivery."""
    dropped: list[Dropped] = field(default_factory=list)
    """Rollouts dropped since the previous delivery."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, each once."""
        return [*itertools.chain(*self.groups), *(rollout for rollout, _ in self.dropped)]


@dataclass(slots=True)
class _Group:
    jobs: list[RolloutTask]
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    kept: list[Rollout] | None = None
    dropped: list[Dropped] = field(default_factory=list)
    """Dropped rollouts of a partly kept group, which are reported with it."""


class RolloutScheduler:
    """Plays groups from a source and delivers them in batches.

    Args:
        rules: rules that select the rollouts of a settled group.
        max_concurrent_rollouts: maximum number of rollouts in flight, at least 1.
        is_open: event that the source waits for between turns; `pause` clears it.
        units: function that returns a group's contribution to the size of a batch.
        patience: number of dropped groups in a row per warning.
    """

    def __init__(
        self,
        source: RolloutSource,
        gate: Gate,
        *,
        rules: GroupRules,
        max_concurrent_rollouts: int,
        is_open: asyncio.Event | None = None,
        units: Callable[[Sequence[Rollout]], int] = lambda rollouts: 1,
        patience: int = 8,
    ) -> None:
        check_least(1, max_concurrent_rollouts=max_concurrent_rollouts)
        self.source = source
        self.gate = gate
        self.rules = rules
        self._units = units
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.is_open = is_open or asyncio.Event()
        """Cleared by `pause`: nothing starts, and a source with this event waits between turns."""
        self.is_open.set()
        self.num_running = 0
        """Number of rollouts in flight."""
        self.patience = patience
        self._failure_detector = StallDetector(patience)
        self._signal_detector = StallDetector(max(patience, SIGNAL_PATIENCE), error=NoSignal)
        self._counter = GroupCounter()
        self._groups: dict[str, _Group] = {}
        self._running: dict[asyncio.Task[None], int] = {}
        self._pending: deque[tuple[str, RolloutTask]] = deque()
        self._num_pending = 0
        self._num_pauses = 0
        self._dropped: list[Dropped] = []
        self._undelivered: list[int] = []  # dataset positions of groups that `mark_delivered` has not confirmed
        self._unreported: list[int] = []  # dataset positions of dropped groups that no delivery has reported
        self._is_end_of_data = self._is_stopped = False
        self._errors: deque[Exception] = deque()  # to be raised; nothing is started meanwhile
        self._coming_version: int | None = None  # of the weights that the engines are loading
        self._update_error: Exception | None = None
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._opening = asyncio.Lock()
        self._admitting: asyncio.Task[None] | None = None

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next rollout starts with."""
        version = self.source.policy_version
        coming = self._coming_version
        return version if coming is None else max(version, coming)

    # The consumer's side

    async def next_batch(self) -> ReadyBatch | None:
        """Return the next full batch; at the end of the data, what is left or dropped, then None.

        Raises:
            CollectionStalled: if too many groups in a row were dropped.
            Exception: if the source failed to open a group, or a weight update failed.
            CancelledError: after `stop`.
        """
        if self._admitting is None and not self._is_stopped:
            self._admitting = asyncio.create_task(self._admit())
        self.gate.request_batch()
        while True:
            if self._is_stopped:
                await cancel_this_task()
            if self._errors:
                error = self._errors.popleft()
                if isinstance(error, CollectionStalled):
                    error.dropped = self._dropped
                    self._dropped = []
                raise error
            if self._update_error is not None:
                error = self._update_error
                self._update_error = None
                raise error
            self._wake.set()
            version = self.policy_version  # of the trainer, even while the engines load it
            for group_id in self.gate.overdue_ids(version):
                self._drop_group(group_id, DropReason.STALE)
            is_last = self._is_end_of_data and all(group.kept is not None for group in self._groups.values())
            selected = self.gate.select(version, is_last=is_last)
            if selected is not None:
                return self._deliver(selected.staleness)
            if is_last:
                return self._deliver({}) if self._dropped else None
            self._changed.clear()
            # An engine's version may change without a notification.
            poll = _VERSION_POLL_SECONDS if self.gate.follows_versions else None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), poll)

    def _deliver(self, staleness: Mapping[str, int]) -> ReadyBatch:
        delivered = [self._groups.pop(group_id) for group_id in staleness]
        if self.gate.rest_reason is not None:
            for group_id in self.gate.live_ids:
                self._drop_group(group_id, self.gate.rest_reason)
        dropped = self._dropped + [one for group in delivered for one in group.dropped]
        self._dropped = []
        self._undelivered = _positions(delivered) + self._unreported
        self._unreported = []
        kept = [group.kept or [] for group in delivered]
        return ReadyBatch(groups=kept, staleness=list(staleness.values()), dropped=dropped)

    def mark_delivered(self) -> None:
        """Record that the caller has the last delivery, so saved states no longer include it."""
        self._undelivered = []

    def rollback(self) -> None:
        """Undo the last delivery in the gate, since nothing in it is trained on."""
        self.gate.rollback()
        self.notify()

    @contextlib.asynccontextmanager
    async def frozen(self) -> AsyncIterator[list[int]]:
        """Yield the positions of drawn and undelivered groups; draw nothing meanwhile."""
        async with self._opening:
            yield self._undelivered + self._unreported + _positions(self._groups.values())

    def notify(self) -> None:
        """Check the gate again after a change that it depends on, such as a new policy version."""
        self._wake.set()
        self._changed.set()

    def expect_version(self, version: int | None) -> None:
        """Start nothing until `end_update`, while engines load this version; None: no update."""
        self._update_error = None
        self._coming_version = version

    def end_update(self, version: int, error: Exception | None = None) -> None:
        """Continue after the engines' update; the next batch raises `error`, if any."""
        if version == self._coming_version:  # else another update has started
            self._update_error = error
            self._coming_version = None
        self.notify()

    async def pause(self) -> None:
        """Start nothing until each pause has its `resume`; requests in flight end."""
        self._num_pauses += 1
        self.is_open.clear()
        await asyncio.sleep(0)  # let tasks that have passed the event start their requests

    def resume(self) -> None:
        """End one `pause`; continue after the last one."""
        self._num_pauses -= 1
        if not self._num_pauses:
            self.is_open.set()
            self._start_pending()
            self.notify()

    async def stop(self) -> None:
        """Cancel everything in flight and wait for it to end, for a limited time."""
        self._is_stopped = True
        tasks = [task for group in self._groups.values() for task in group.tasks]
        if self._admitting is not None:
            tasks.append(self._admitting)
        for task in tasks:
            task.cancel()
        self._changed.set()  # wakes a caller that waits for a batch
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_SECONDS)

    # The source's side

    async def _admit(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                is_more = True
                while is_more and self.is_open.is_set() and not self._errors:
                    async with self._opening:
                        is_more = await self._admit_some()
            except BaseException as error:
                if self._is_stopped:
                    raise
                self._errors.append(as_exception(error))
                self._changed.set()

    async def _admit_some(self) -> bool:
        room = self.max_concurrent_rollouts - self.num_running - self._num_pending
        version = self.source.policy_version
        if version < self.policy_version:
            return False
        wanted = min(self.gate.num_admissible(version), math.ceil(room / self.source.group_size))
        if wanted < 1 or self._is_end_of_data:
            return False
        groups = await self.source.open(int(wanted))
        for jobs in groups:
            records = [record for job in jobs for record in job.records]
            group_id = records[0].group_id if self.source.group_size > 1 else records[0].rollout_id
            self._counter.open(group_id, len(records))
            self.gate.admit(group_id, version)
            self._groups[group_id] = _Group(jobs)
            self._pending.extend((group_id, job) for job in jobs)
            self._num_pending += len(records)
        if len(groups) < wanted:
            self._is_end_of_data = True
            self._changed.set()
        self._start_pending()
        return bool(groups)

    def _start_pending(self) -> None:
        while self._pending and self.is_open.is_set() and not self._is_stopped:
            group_id, job = self._pending[0]
            size = len(job.records)
            if self.num_running and self.num_running + size > self.max_concurrent_rollouts:
                return
            self._pending.popleft()
            self._num_pending -= size
            if group_id not in self._groups:  # dropped while it waited
                continue
            self.num_running += size
            task = asyncio.create_task(self._play(group_id, job))
            tasks = self._groups[group_id].tasks
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            self._running[task] = size
            task.add_done_callback(self._end_running)  # also if it is cancelled before its first step

    def _end_running(self, task: asyncio.Task[None]) -> None:
        """Free the places of a task once: after it has played, or when it ends early."""
        size = self._running.pop(task, 0)
        if size:
            self.num_running -= size
            self._start_pending()
            self._wake.set()

    async def _play(self, group_id: str, job: RolloutTask) -> None:
        try:
            rollouts = await self.source.play(job)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._is_given_up(group_id):
                raise
            rollouts = [_failed(record, as_exception(error)) for record in job.records]
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._end_running(task)
        if group_id not in self._groups:  # dropped meanwhile
            return
        try:
            for rollout in rollouts:
                settled = self._counter.settle(group_id, rollout)
                if settled is not None:
                    await self._settle_group(group_id, settled)
        except BaseException as error:  # the user's rules failed, or collection stalled
            if isinstance(error, asyncio.CancelledError) and self._is_given_up(group_id):
                raise
            self._errors.append(as_exception(error))
            self._changed.set()
            if group_id in self._groups:
                self._drop_group(group_id, DropReason.FAILED_GROUP)

    def _is_given_up(self, group_id: str) -> bool:
        """Return whether the scheduler cancelled the task, and not the code that it called."""
        return self._is_stopped or group_id not in self._groups

    async def _settle_group(self, group_id: str, settled: list[Rollout]) -> None:
        await self.source.score_group(settled)
        if group_id not in self._groups:  # dropped meanwhile
            return
        self._changed.set()
        kept, dropped = self.rules.judge(settled)
        # Rollouts without units, such as those that ended before a step, add nothing to a batch.
        empty = [rollout for rollout in kept if not self._units([rollout])]
        dropped = [*dropped, *((rollout, rollout.reason or DropReason.NOTHING_TRAINED) for rollout in empty)]
        kept = [rollout for rollout in kept if self._units([rollout])]
        if kept:
            self._groups[group_id].kept = kept
            self._groups[group_id].dropped = dropped
            self.gate.mark_ready(group_id, self._units(kept))
            self._failure_detector.delivered()
            self._signal_detector.delivered()
            return
        self._dropped += dropped
        self._unreported += _positions([self._groups.pop(group_id)])
        self.gate.discard(group_id)
        is_filtered = {DropReason.CONSTANT_REWARDS, DropReason.FILTERED_GROUP} & {reason for _, reason in dropped}
        (self._signal_detector if is_filtered else self._failure_detector).dropped(dropped)

    def _drop_group(self, group_id: str, reason: str) -> None:
        """Drop a group that is being played or ready, and record each of its rollouts."""
        group = self._groups.pop(group_id)
        self._unreported += _positions([group])
        self.gate.discard(group_id)
        self._counter.abandon(group_id)
        for task in group.tasks:
            task.cancel()
        rollouts = group.kept or [record for job in group.jobs for record in job.records]
        dropped = [(_aborted(rollout), reason) for rollout in rollouts]
        self._dropped += [*dropped, *group.dropped]
        if reason == DropReason.STALE:
            try:
                self._failure_detector.dropped(dropped)
            except CollectionStalled as error:
                self._errors.append(error)


def _positions(groups: Iterable[_Group]) -> list[int]:
    return [position for group in groups for job in group.jobs for position in job.positions]


def _aborted(rollout: Rollout) -> Rollout:
    if not rollout.status.is_settled:
        rollout.status = RolloutStatus.ABORTED
        rollout.reason = StopReason.ABORTED
    return rollout


def _failed(record: Rollout, error: BaseException) -> Rollout:
    record.status = RolloutStatus.ERROR
    record.reason = StopReason.ENGINE_ERROR
    record.error = describe(error)
    record.traceback = traceback_of(error)
    return record
