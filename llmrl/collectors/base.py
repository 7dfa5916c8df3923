"""What collectors share: batches, a replay buffer filled in the background, pause, state, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from llmrl.collectors.buffer import BufferFiller
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.scheduler import Delivery, RolloutScheduler, RolloutSource
from llmrl.collectors.shape import BatchShape
from llmrl.collectors.staleness import LatePolicy, StalenessGate
from llmrl.data import Rollout
from llmrl.data.background_loop import BackgroundLoop
from llmrl.envs import DatasetChatEnv

Result = TypeVar("Result")


class BatchCollector:
    """Batches from a source of rollouts. See `LLMCollector` for the arguments; this class is not used by itself."""

    def __init__(
        self,
        source: RolloutSource,
        *,
        dataset_env: DatasetChatEnv | None,
        engine: Any,
        shape: BatchShape,
        rules: GroupRules,
        max_concurrent_rollouts: int | None,
        is_open: asyncio.Event | None = None,
        num_extra_groups: int = 0,
        max_staleness: int | None = None,
        late_groups: LatePolicy = "wait",
        total_dialog_turns: int = -1,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
    ) -> None:
        if max_concurrent_rollouts is not None and max_concurrent_rollouts < 1:
            raise ValueError(f"max_concurrent_rollouts must be at least 1, got {max_concurrent_rollouts}.")
        if num_extra_groups and (max_staleness is not None or shape.kind != "groups"):
            raise ValueError("num_extra_groups needs groups_per_batch, and no max_staleness: those groups would wait.")
        self._source, self._shape = source, shape
        self._dataset_env, self._engine = dataset_env, engine
        self.total_dialog_turns, self.postproc, self.replay_buffer = total_dialog_turns, postproc, replay_buffer
        num_batches_ahead = 1 + (max_staleness or 0)
        per_batch = (shape.size if shape.kind != "tokens" else 8) * source.group_size
        gate: Any
        if max_staleness is not None:
            gate = shape.staleness_gate(max_staleness=max_staleness, late=late_groups)
        else:
            gate = shape.demand_gate(
                num_extra_groups=num_extra_groups,
                num_ahead=0 if shape.is_grouped else max_concurrent_rollouts or 0,
                is_free_running=replay_buffer is not None,
            )
        self.max_concurrent_rollouts = (
            max_concurrent_rollouts or per_batch * num_batches_ahead + num_extra_groups * source.group_size
        )
        self._scheduler = RolloutScheduler(
            source,
            gate,
            rules=rules,
            max_concurrent_rollouts=self.max_concurrent_rollouts,
            units=shape.units,
            patience=max(1, shape.size if shape.kind == "groups" else 8),
            is_open=is_open,
        )
        self._background = BackgroundLoop("llmrl-collector")
        self._filler = None if replay_buffer is None else BufferFiller(self._next, replay_buffer)
        self._waiting_for: Future[Delivery | None] | None = None
        self._num_turns = 0
        self._left_over: list[TensorDictBase] = []
        self._schemes, self._senders = dict(weight_sync_schemes or {}), dict[str, Any]()
        self.report: CollectionReport | None = None
        """What the collection of the last batch did."""
        self.rollouts: list[Rollout] = []
        """Records of the last batch's rollouts, those dropped since the batch before included."""

    # Batches

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        while (batch := self._next()) is not None:
            if self.replay_buffer is None:
                yield batch
            else:  # as TorchRL's: the buffer has the batch
                self.replay_buffer.extend(batch)
                yield None

    def next(self) -> TensorDictBase:
        """The next batch.

        Raises:
            StopIteration: at the end of the data, or of `total_dialog_turns`.
        """
        batch = self._next()
        if batch is None:
            raise StopIteration
        return batch

    def _next(self) -> TensorDictBase | None:
        while self.total_dialog_turns < 0 or self._num_turns < self.total_dialog_turns:
            started = time.perf_counter()
            delivery = self._next_delivery()
            if delivery is None and not self._left_over:
                return None
            groups = [] if delivery is None else delivery.groups
            batch, self._left_over = self._shape.assemble(groups, self._left_over)
            if delivery is not None:
                self._take_over(delivery, seconds=time.perf_counter() - started)
            self._num_turns += self._count_turns(batch)
            if batch is not None:
                return batch if self.postproc is None else self.postproc(batch)
        return None

    def _next_delivery(self) -> Delivery | None:
        # An interrupted wait is taken up by the next call, so that no batch falls between two chairs.
        if self._waiting_for is None:
            self._waiting_for = asyncio.run_coroutine_threadsafe(self._scheduler.next_batch(), self._background.loop)
        waiting_for = self._waiting_for
        try:
            return waiting_for.result()
        finally:
            if waiting_for.done():
                self._waiting_for = None

    def _take_over(self, delivery: Delivery, *, seconds: float) -> None:
        self.rollouts = [rollout for group in delivery.groups for rollout in group]
        self.rollouts += [rollout for rollout, _ in delivery.dropped]
        self.report = CollectionReport.of(
            self.rollouts, seconds=seconds, dropped=delivery.dropped, staleness=delivery.staleness
        )

    def _count_turns(self, batch: TensorDictBase | None) -> int:
        if self._shape.kind == "turns":  # turns that wait for the next batch are not in this one's budget
            return 0 if batch is None else batch.shape[0]
        return sum(rollout.num_turns for rollout in self.rollouts)

    # In the background

    def start(self) -> None:
        """Fill the replay buffer in the background from now on, as far ahead of training as `max_staleness` allows.

        Raises:
            RuntimeError: without a replay buffer, or when it runs already.
        """
        if self._filler is None:
            raise RuntimeError("start() fills a replay buffer: build the collector with replay_buffer=.")
        if isinstance(self._scheduler.gate, StalenessGate):
            # The thread asks at once for the next batch: that says nothing of how far training is.
            self._scheduler.gate.is_unasked = True
        self._filler.start()

    def is_running(self) -> bool:
        """Whether the buffer is being filled.

        Raises:
            Exception: whatever ended the filling, once.
        """
        return self._filler is not None and self._filler.is_running()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """No rollout and no turn is started, and nothing is written into the buffer, within this context."""
        writing = self._filler.lock if self._filler is not None else contextlib.nullcontext()
        self._background.loop.call_soon_threadsafe(self._scheduler.pause)
        try:
            with writing:
                yield
        finally:
            self._background.loop.call_soon_threadsafe(self._scheduler.resume)

    # Weights

    def update_policy_weights_(self, policy_or_weights: Any = None) -> int:
        """Send the trainer's weights to the engines by the schemes; the new policy version.

        The first call needs the trainer's model (or a mapping of its weights); later ones remember it.

        Raises:
            ValueError: without a scheme, or without a model at the first call.
        """
        if not self._schemes:
            raise ValueError("update_policy_weights_ needs weight_sync_schemes={'policy': scheme}.")
        version = 0
        for name, scheme in self._schemes.items():
            if name not in self._senders:
                if policy_or_weights is None:
                    raise ValueError("the first update_policy_weights_ needs the trainer's model.")
                self._senders[name] = self._make_sender(scheme, policy_or_weights)
            version = max(version, self._senders[name].update_weights())
        self._background.loop.call_soon_threadsafe(self._scheduler.notify)
        return version

    def _make_sender(self, scheme: Any, model: Any) -> Any:
        from llmrl.weight_sync import get_model_metadata

        if self._engine is None:
            raise ValueError("weight_sync_schemes need an engine that is reached from here: pass engine=.")
        sender = scheme.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), self._engine)
        return sender

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next rollout starts with."""
        return self._source.policy_version

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue the very same sequence of prompts and ids.

        Groups that were drawn and not delivered yet are among it by their place in the dataset: they are played
        again, from their prompts, before new ones are drawn.
        """
        return self._run(self._state_dict())

    async def _state_dict(self) -> dict[str, Any]:
        async with self._scheduler.holding_still() as unfinished:
            state: dict[str, Any] = {"num_turns": self._num_turns}
            if self._dataset_env is not None:
                prompts = self._dataset_env.prompts.state_dict(unfinished=unfinished)
                state["env"] = {**self._dataset_env.state_dict(), "prompts": prompts}
            return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; before the first batch."""
        self._num_turns = state["num_turns"]
        if self._dataset_env is not None:
            self._dataset_env.load_state_dict(state["env"])

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._background.run(coroutine)

    def shutdown(self) -> None:
        """Cancel what is in flight and end the collector's threads. Engines are their owner's. May be called twice."""
        if not self._background.is_closed:
            if self._waiting_for is not None:
                self._waiting_for.cancel()
            self._run(self._scheduler.stop())
            if self._filler is not None:
                self._filler.stop()
            self._background.close()
        for sender in self._senders.values():
            sender.shutdown()
        self._senders = {}

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.shutdown()


def dataset_env_of(env: EnvBase) -> DatasetChatEnv | None:
    """The dataset environment under an environment's transforms, if it is one."""
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if isinstance(env, DatasetChatEnv) else None
