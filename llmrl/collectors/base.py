"""Common part of collectors: batches, a buffer, pauses, weight updates and saved state."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Protocol, Self

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.garbage import search_young
from llmrl._utils.other_libraries import missing_attribute
from llmrl._utils.types import StateDict
from llmrl.collectors.buffer import BufferFiller, QueueBuffer, TakesBatches
from llmrl.collectors.groups import SIGNAL_PATIENCE, CollectionStalled, Dropped, NoSignal, StallDetector
from llmrl.collectors.report import CollectionReport, CollectionTally
from llmrl.collectors.rows import portable_turn
from llmrl.collectors.scheduler import ReadyBatch, RolloutScheduler, RolloutSource, RolloutTask
from llmrl.collectors.shape import BatchShape, check_group_size
from llmrl.collectors.weights import Weights, WeightScheme, WeightSenders
from llmrl.data import Rollout
from llmrl.envs import DataLoadingPrimer, DatasetChatEnv, MixedEnv


class CollectorSource(RolloutSource, Protocol):
    """Source of rollouts, with everything that a collector uses."""

    is_open: asyncio.Event
    """Cleared while no rollout and no turn may start."""
    num_players: int  # consecutive rollouts of a group that wait for each other

    @property
    def dataset_env(self) -> DatasetChatEnv | DataLoadingPrimer | MixedEnv | None:
        """Environment with its position in the dataset, which is part of the saved state."""

    @property
    def engine(self) -> object:
        """Engine that receives the weights."""

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw `count` rollouts, or fewer if the data ends."""

    def shutdown(self) -> None:
        """Release threads or actors."""


class BatchCollector:
    """Base class of `LLMCollector`, which assembles batches from the scheduler's deliveries."""

    init_random_frames = 0
    """Turns that TorchRL's trainers collect before training; none for a pretrained model."""

    def __init__(
        self,
        source: CollectorSource,
        scheduler: RolloutScheduler,
        shape: BatchShape,
        *,
        total_dialog_turns: int,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
        replay_buffer: TakesBatches | None,
        reset_each_batch: bool,
        weight_sync_schemes: Mapping[str, WeightScheme] | None,
        verbose: bool,
    ) -> None:
        self._source = source
        self._scheduler = scheduler
        self._shape = shape
        self._reset_each_batch = reset_each_batch
        self.total_dialog_turns = total_dialog_turns
        self.postproc = postproc
        self.replay_buffer = replay_buffer
        self.verbose = verbose
        self._background = BackgroundLoop("llmrl-collector")
        # Without `shutdown`, rollouts end with the collector or with the program.
        weakref.finalize(self, BackgroundLoop.abandon, self._background)
        self.post_collect_hook: Callable[[TensorDictBase], object] | None = None
        """Function that is called with each batch (`set_post_collect_hook`), or None."""
        self._filler = None if replay_buffer is None else BufferFiller(self._next, self._write)
        self._pending_batch: Future[ReadyBatch | None] | None = None
        self._batch_lock = threading.Lock()  # held by a caller of `next` until it has its batch
        self._frames = 0  # turns, under TorchRL's name
        self._left_over: list[TensorDictBase] = []
        # (number of turns, turns left over) to record when the current batch is delivered
        self._once_delivered: tuple[int, list[TensorDictBase]] = (0, [])
        self._groups: list[list[Rollout]] = []  # groups of the current batch
        self._collected = self._reported = CollectionTally(is_grouped=shape.is_grouped)
        self._signal_detector = StallDetector(max(scheduler.patience, SIGNAL_PATIENCE), error=NoSignal)
        self._weight_senders = WeightSenders(weight_sync_schemes or {}, source)
        self.report: CollectionReport | None = None
        """Report on the collection of the last batch."""
        self.rollouts: list[Rollout] = []
        """Records of the last batch's rollouts, and of those dropped since the previous batch."""
        self.on_empty_batch: Callable[[], object] = lambda: None
        """Called if no row of a batch can be trained on, before another batch is collected in its place. `report` and
        `rollouts` then cover everything since the last delivered batch."""
        self.num_played = 0  # rollouts of the current call of `play`

    if not TYPE_CHECKING:  # type checkers would accept any attribute

        def __getattr__(self, name):
            raise missing_attribute(self, name)

    # Batches

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while True:
            with self._batch_lock, self._reading():
                batch = self._next()
                if batch is None:
                    return
                if self.replay_buffer is None:
                    self._delivered()
                elif self._write(batch):
                    batch = None  # as in TorchRL: it is in the buffer
                else:
                    continue
            yield batch

    def next(self) -> TensorDictBase:
        """Return the next batch. Threads that call this at the same time get different batches.

        Raises:
            StopIteration: at the end of the data, or after `total_dialog_turns`.
            RuntimeError: after `shutdown`, or while `start` fills the buffer.
        """
        with self._batch_lock, self._reading():
            batch = self._next()
            if batch is not None:
                self._delivered()
                return batch
        raise StopIteration

    @property
    def dialog_turns_per_batch(self) -> int | None:
        """Number of turns, or of last turns, per batch; None for batches of groups."""
        return self._shape.size if not self._shape.is_grouped else None

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Apply a function to each batch from now on.

        Raises RuntimeError if there is a `postproc`, and ValueError if it compares groups of another size.
        """
        if self.postproc is not None:
            raise RuntimeError("the collector has a postproc already; put both into one function.")
        check_group_size(postproc, self._source.dataset_env)
        self.postproc = postproc

    def set_post_collect_hook(self, hook: Callable[[TensorDictBase], object] | None) -> None:
        """Call a function with each batch from now on, after `postproc`; None calls nothing."""
        self.post_collect_hook = hook

    def getattr_rb(self, attr: str) -> object:
        """Return an attribute of the replay buffer, such as `write_count`."""
        return getattr(self.replay_buffer, attr)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise RuntimeError if `start` reads batches, or if the collector is shut down."""
        if self.is_running():
            raise RuntimeError(
                "the collector is filling its buffer since start(), and batches would have two readers: sample the "
                "buffer in place of iterating over the collector, or do not call start()."
            )
        try:
            yield
        except CancelledError as error:
            raise RuntimeError("the collector was shut down while it collected this batch.") from error

    def _next(self) -> TensorDictBase | None:
        """Return the next batch with rows, or None; a saved state has its groups until delivery.

        If the rules and `postproc` leave no rows, another batch is collected, and its report
        includes what was dropped.
        """
        try:
            return self._next_with_rows()
        except CollectionStalled as error:
            self._collected.add(ReadyBatch(groups=[], staleness=[], dropped=list(error.dropped)), seconds=0.0)
            self._report()
            raise

    def _next_with_rows(self) -> TensorDictBase | None:
        while self.total_dialog_turns < 0 or self._frames < self.total_dialog_turns:
            started = time.perf_counter()
            delivery = self._next_delivery()
            if delivery is None and not self._left_over:
                break
            self._groups = [] if delivery is None else delivery.groups
            batch, rest = self._shape.assemble(self._groups, self._left_over)
            if self._reset_each_batch:
                rest = []
            self._once_delivered = (self._count_turns(batch, delivery), rest)
            if delivery is not None:
                self._collected.add(delivery, seconds=time.perf_counter() - started)
            if batch is not None and self.postproc is not None:
                try:
                    batch = self.postproc(batch)
                    if not isinstance(batch, TensorDictBase):
                        raise TypeError(
                            f"postproc must return the batch to train on, a TensorDict, which may have no rows; got "
                            f"{batch!r:.80}."
                        )
                except BaseException:
                    self._lose()
                    raise
            left_out = self._collected.leave_out(self._groups, batch)
            if batch is not None and batch.batch_size.numel():
                self._report()
                if self.post_collect_hook is not None:
                    with self._lost_on_error():
                        self.post_collect_hook(batch)
                return batch
            self._nothing_trained(left_out)
        if self._collected.rollouts:
            self._report()
        return None

    def _nothing_trained(self, left_out: Sequence[Dropped]) -> None:
        """Prepare to collect another batch in place of the current one."""
        self._mark_delivered()
        self._background.post(self._scheduler.rollback)
        self._show(self._collected)
        self.on_empty_batch()
        for group_id in {group[0].group_id for group in self._groups}:
            self._signal_detector.dropped([one for one in left_out if one[0].group_id == group_id])

    def _write(self, batch: TensorDictBase) -> bool:
        """Write a batch into the buffer, and return whether the buffer kept any of it."""
        assert self.replay_buffer is not None
        with self._lost_on_error():
            indices = self.replay_buffer.extend(batch)
        if not isinstance(indices, torch.Tensor) or indices.numel():
            self._delivered()
            return True
        # The buffer's transforms kept nothing: count these rollouts with the next batch.
        self._collected = self._reported
        self._nothing_trained(self._collected.leave_out(self._groups, None))
        return False

    def _lose(self) -> None:
        """Count the rollouts of a lost batch with those of the next one."""
        self._collected.leave_out(self._groups, None)
        self._mark_delivered()

    @contextlib.contextmanager
    def _lost_on_error(self) -> Iterator[None]:
        """Lose the reported batch after an error; after an interrupt, a saved state has it."""
        try:
            yield
        except Exception:
            self._collected = self._reported
            self._lose()
            raise

    def _delivered(self) -> None:
        self._signal_detector.delivered()
        self._mark_delivered()

    def _mark_delivered(self) -> None:
        num_turns, self._left_over = self._once_delivered
        self._frames += num_turns
        self._scheduler.mark_delivered()

    def _next_delivery(self) -> ReadyBatch | None:
        search_young()  # collect the reference cycles of the training step, which may hold tensors
        # The next call continues an interrupted wait, so that no batch is lost.
        pending_batch = self._pending_batch or self._background.submit(self._scheduler.next_batch())
        self._pending_batch = pending_batch
        try:
            delivery = pending_batch.result()
        except Exception:  # and not an interrupt of this thread, which may come when the batch is ready
            self._pending_batch = None
            raise
        self._pending_batch = None
        return delivery

    def _report(self) -> None:
        self._reported = self._collected
        self._collected = CollectionTally(is_grouped=self._shape.is_grouped)
        self._show(self._reported)
        if self.verbose:
            print(f"{type(self).__name__}: {self.report}", file=sys.stderr)

    def _show(self, tally: CollectionTally) -> None:
        self.rollouts = list(tally.rollouts)
        self.report = tally.report()

    def _count_turns(self, batch: TensorDictBase | None, delivery: ReadyBatch | None) -> int:
        if self._shape.kind == "turns":  # left-over turns count when they are delivered
            return 0 if batch is None else batch.shape[0]
        return 0 if delivery is None else sum(rollout.num_turns for rollout in delivery.rollouts)

    # In the background

    def start(self) -> None:
        """Fill the replay buffer in the background, as far ahead of training as `max_staleness` and a queue allow.

        The collector cannot be iterated meanwhile. Raises RuntimeError without a buffer, or if it is being filled.
        """
        if self._filler is None:
            raise RuntimeError("start() fills a replay buffer: build the collector with replay_buffer=, or queue=.")
        self._scheduler.gate.run_unasked()
        self._filler.start()

    def is_running(self) -> bool:
        """Return whether the buffer is being filled; raise the error that ended this, once."""
        return self._filler is not None and self._filler.is_running()

    def is_initialized(self) -> bool:
        """Return whether the collector can yield batches; false after `shutdown`."""
        return not self._background.is_closed

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Suspend collection within this context: no rollout or turn starts, and nothing is written to the buffer.

        Pauses may overlap; the end of the last one continues, unless the collector was shut down meanwhile.
        """
        self._background.run(self._scheduler.pause())
        try:
            with self._not_writing():
                yield
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so there is nothing to continue
                self._background.post(self._scheduler.resume)

    def _not_writing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._filler is None else self._filler.lock

    # Weights

    def update_policy_weights_(self, policy_or_weights: Weights | TensorDictModuleBase | None = None) -> int:
        """Send the trainer's weights to the engines, and return the new policy version.

        The first call needs the model or a mapping of its weights, or it raises ValueError. Later calls default to it.
        """
        version = max(sender.update_weights() for sender in self._weight_senders.connected(policy_or_weights))
        self._scheduler.expect_version(None)
        self._updated(version)
        return version

    def start_update(self, policy_or_weights: Weights | TensorDictModuleBase | None = None) -> Future[int]:
        """Start to send the weights; training may continue while the engines load a copy.

        No rollout starts until the engines have the weights; meanwhile `policy_version` is the new
        version. Weights that cannot be copied are sent before this method returns. The first call
        needs the model, otherwise it raises ValueError.

        Returns:
            A future with the new policy version or the error. The next batch also raises the error,
            unless another update starts first.
        """
        senders = self._weight_senders.connected(policy_or_weights)
        coming = self.policy_version + 1
        updates = [sender.start_update() for sender in senders]
        self._scheduler.expect_version(coming)

        async def finish() -> int:
            try:
                version = max([await asyncio.wrap_future(update) for update in updates])
            except Exception as error:
                self._scheduler.end_update(coming, error)
                raise
            self._updated(version)
            self._scheduler.end_update(coming)
            return version

        return self._background.submit(finish())

    def _updated(self, version: int) -> None:
        self._background.post(self._scheduler.notify)

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next rollout starts with."""
        return self._scheduler.policy_version

    def get_policy_version(self) -> int:
        """Return `policy_version`, for callers that expect a method."""
        return self.policy_version

    # State

    def state_dict(self) -> StateDict:
        """Return the state from which a collector continues the same sequence of prompts and ids.

        Groups that were drawn and not delivered are saved by their positions in the dataset, and are played again
        before new ones are drawn. Left-over turns are saved without live objects (conversation, environment).
        """
        with self._not_writing():
            return self._background.run(self._state_dict())

    async def _state_dict(self) -> StateDict:
        async with self._scheduler.frozen() as unfinished:
            left_over = [portable_turn(step) for step in self._left_over]
            state: StateDict = {"num_turns": self._frames, "left_over": left_over, "kind": self._shape.kind}
            dataset_env = self._source.dataset_env
            if dataset_env is not None:
                prompts = dataset_env.prompts.state_dict(unfinished=unfinished)
                state["env"] = {**dataset_env.state_dict(), "prompts": prompts}
            return state

    def load_state_dict(self, state: StateDict) -> None:
        """Continue from a saved state; call this before the first batch.

        Raises ValueError if the state has another kind of batch, or another order of prompts.
        """
        if state.get("kind") != self._shape.kind:
            raise ValueError(
                f"the state was saved with batches of {state.get('kind')}, and this collector has batches of "
                f"{self._shape.kind}: build the collector as it was when the state was saved."
            )
        self._frames = state["num_turns"]
        self._left_over = list(state["left_over"])
        self._scheduler.gate.carry(len(self._left_over))
        if self._source.dataset_env is not None:
            self._source.dataset_env.load_state_dict(state["env"])

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """Cancel all rollouts and end the collector's threads or actors. May be called twice.

        The caller closes environments and engines. `timeout`: seconds to wait for a batch that is being written.
        """
        if not self._background.is_closed:
            self._background.run(self._scheduler.stop())
            if isinstance(self.replay_buffer, QueueBuffer):
                self.replay_buffer.close()
            if self._filler is not None:
                self._filler.stop(timeout)
            self._background.close()
            self._source.shutdown()
        self._weight_senders.shutdown()

    def async_shutdown(self, timeout: float | None = 10.0) -> None:
        """Call `shutdown` (TorchRL's name for a collector that runs in the background)."""
        self.shutdown(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
