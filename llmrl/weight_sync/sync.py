"""`WeightSync`: sends weights from the trainer's model to engines while they generate."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from llmrl.engines.base import EngineError, PauseMode, UpdatableEngine
from llmrl.trainer.trained_model import TrainedModel, trained_model
from llmrl.weight_sync.channels import Channel
from llmrl.weight_sync.engine_group import EngineGroup, held_for
from llmrl.weight_sync.int8 import Int8Weights
from llmrl.weight_sync.member import Member
from llmrl.weight_sync.source import ModelMetadata, ModelWeights, Weights, get_model_metadata, model_of

logger = logging.getLogger(__name__)

_NOT_CONNECTED = "the workers are not connected yet; call sender.init_all_workers_group(...) first."


class WeightSyncError(EngineError):
    """Failure of an update, which may be retried; the message says which weights the engines hold."""


class ReplicaLostError(WeightSyncError):
    """Death or hang of engines in an update, which can be repeated with the remaining or replacement engines."""


class WeightSync:
    """Sender of a model's weights: register the model, open the group once, then update any number of times.

    An update stages the weights in a `Channel` while the engines generate, pauses the engines, transfers the weights,
    and lets the engines load and resume when all have received them. A scheme's `create_sender` creates it. Each rank
    of a trainer has one; only rank 0's has engines, and the others make the same calls to gather sharded weights.

    Args:
        open_channel: function that returns the channel from a source to a weight-transfer backend,
            None without engines.
        pause_mode, reset_running_requests, rank: see `VLLMWeightSyncScheme`.
        needs_engine: whether rank 0 requires an engine.
        make_source: class that reads the model's weights or adapters in the engines' dtype.
    """

    def __init__(
        self,
        open_channel: Callable[[ModelWeights, str | None], Channel],
        *,
        pause_mode: PauseMode = "keep",
        reset_running_requests: bool = True,
        rank: int = 0,
        needs_engine: bool = True,
        make_source: type[ModelWeights] = ModelWeights,
    ) -> None:
        self._make_source = make_source
        self._open_channel = open_channel
        self._rank = rank
        self._needs_engine = needs_engine
        self._pause_mode = pause_mode
        self._reset_running_requests = reset_running_requests
        self._model: Weights | None = None
        self._source: ModelWeights | None = None
        self._group: EngineGroup | None = None
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmrl-weight-update")
        self._is_copied: threading.Event | None = None
        self._last_version = 0
        """Highest version that any engine, dead ones included, may have loaded; never reused for other weights."""
        self._has_warned = False
        self.last_timings: dict[str, float] = {}
        """Seconds of each phase of the last update: `stage_s` (engines still generate), `pause_s`, `send_s` (workers
        receive and check), `load_s` (workers load and reset their prefix caches), `resume_s`."""

    def register_model(self, model: Weights) -> None:
        """Set the source of weights, read at each update: a model, its policy, or tensors by checkpoint name."""
        with self._lock:
            self._model = model_of(model)
            if self._source is not None or self._group is not None:
                self._open()

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata | None = None,
        engine: UpdatableEngine | Sequence[UpdatableEngine] | None = None,
        *,
        vllm_engine: UpdatableEngine | Sequence[UpdatableEngine] | None = None,
    ) -> None:
        """Connect to the workers of one engine, or of several engines that hold the same weights.

        Replicas that restart later (`EngineReplicas`) receive the current weights before they
        serve. A warning is issued if the engines' dtype differs from that of the model's policy.

        Args:
            model_metadata: from `get_model_metadata`; checked against the registered model.
            engine: an `AsyncVLLM`, a sequence of them, or `EngineReplicas`; `None` on ranks above 0.
            vllm_engine: TorchRL's name of `engine`.

        Raises RuntimeError if no model is registered, ValueError if the metadata is of another model or an engine
        cannot take the weights, and EngineError if a worker cannot be reached, or has another model.
        """
        engine = vllm_engine if engine is None else engine
        if self._model is None:
            raise RuntimeError("no model is registered; call sender.register_model(model) first.")
        if engine is None and self._rank == 0 and self._needs_engine:
            raise ValueError("engine must be an AsyncVLLM or a sequence of them, got None.")
        if engine is not None and self._rank > 0:
            raise ValueError(
                f"rank {self._rank} has no engine: rank 0 sends the weights, and the other ranks help to gather them."
            )
        with self._lock:
            if self._group is not None:
                self._group.shutdown()
                self._group = None
            if engine is not None:
                self._group = EngineGroup(
                    engine, pause_mode=self._pause_mode, reset_running_requests=self._reset_running_requests
                )
            source = self._open()
            if model_metadata is not None:
                _require_same(get_model_metadata(self._model), model_metadata)
            self._share_length(source)
            if self._group is None or self._channel is None:
                return
            self._last_version = max(self._last_version, self._group.last_version)  # dead engines may leave the list
            if (record := self._record()) is not None:
                first = self._group.first
                record.engine_dtype = first.model_dtype
                record.is_engine_int8 = first.quantization is not None
                record.untested_arguments = getattr(first, "untested_arguments", ())
                if record.engine_version is None:  # trainer and engine have their initial weights
                    record.engine_version = self._group.policy_version
                self._compare_dtypes(record)
            self._group.connect(self._group.members(), self._channel)
            self._group.call_before_serving(self.bring_up_to_date)

    def update_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Load the model's weights (or `weights`, by checkpoint name) into the engines; return their version.

        Blocks; in an event loop use `asyncio.to_thread`. Dead engines are left out; if all are dead and
        `EngineReplicas` restarts them, the update waits for one. Raises RuntimeError before `init_all_workers_group`,
        and WeightSyncError if an engine fails; the message says which weights the engines hold.
        """
        with self._lock:
            if self._source is None:
                raise RuntimeError(_NOT_CONNECTED)
            self._source.override = weights or {}
            update = self._update_together if self._source.is_sharded else self._update
            while True:
                try:
                    return update(self._source)
                except ReplicaLostError as error:  # each repetition has fewer engines or restarts
                    logger.warning("%s The update is repeated with the remaining engines.", error)

    def start_update(self, weights: Mapping[str, torch.Tensor] | None = None) -> Future[int]:
        """Start `update_weights` in a thread; return its future once weights are copied, so training may continue.

        Sharded weights, and weights that are not copied (NCCL, CUDA IPC), are sent before it returns.
        """
        is_copied = threading.Event()

        def update() -> int:
            with self._lock:
                self._is_copied = is_copied
                try:
                    return self.update_weights(weights)
                finally:
                    self._is_copied = None
                    is_copied.set()

        future = self._pool.submit(update)
        is_copied.wait()
        return future

    def bring_up_to_date(self, engine: UpdatableEngine) -> None:
        """Send the last weights and their version to an engine that missed updates.

        Raises EngineError if the engine dies meanwhile, and WeightSyncError if the weights are no longer held.
        """
        with held_for(engine, self._lock):
            group = self._group
            channel = self._channel
            if group is None or channel is None:
                raise RuntimeError(_NOT_CONNECTED)
            version = max(one.policy_version for one in [*group.engines, engine])
            staged = channel.staged_version
            if staged is not None and staged <= self._last_version:  # the engines that loaded it may have died
                version = max(version, staged)
            if engine.policy_version == version:
                return
            if channel.staged_version != version:
                raise WeightSyncError(
                    f"this trainer no longer holds the weights of version {version}; the engine may serve after the "
                    "next update."
                )
            members = [group.member_of(engine)]
            group.connect(members, channel)
            with group.paused(members):
                group.take(members)
                group.commit(members, version)

    def shutdown(self) -> None:
        """Release memory, communicators and threads, but not the engines. May be called twice."""
        self._pool.shutdown()
        with self._lock:
            if self._group is not None:
                self._group.shutdown()
            if self._channel is not None:
                self._channel.close()
            self._channel = self._group = self._source = None

    def _open(self) -> ModelWeights:
        assert self._model is not None
        if self._group is not None:
            self._group.disconnect()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._source = None  # if this fails, an update must not take the sender for open
        make_source = self._make_source
        dtype = backend = None
        if self._group is not None:
            dtype = self._group.first.model_dtype
            backend = self._group.backend
            if self._group.first.quantization is not None:
                make_source = Int8Weights
        source = make_source(self._model, dtype)
        if self._rank == 0:
            self._channel = self._open_channel(source, backend)
        self._source = source
        return source

    def _update(self, source: ModelWeights) -> int:
        group = self._group
        channel = self._channel
        if channel is None:  # a rank above 0
            source.gather_the_rest()
            return -1
        if group is None:
            return channel.stage(None)
        clock = _Clock()
        record = self._record()
        if record is not None:
            self._compare_dtypes(record)  # the policy may have been created after this sender
            # later training steps are not part of this update
            record.engine_version = None
            record.num_updates = 0
        group.members()  # fail before staging if no engine lives
        version = channel.stage(max(group.last_version, self._last_version) + 1)
        clock.lap("stage_s")
        if self._is_copied is not None and channel.can_roll_back and not source.is_sharded:
            self._is_copied.set()
        while True:
            try:
                self._give(group, channel, version, clock)
                break
            except ReplicaLostError as error:
                if channel.staged_version != version:
                    raise
                logger.warning("%s The update is repeated with replacement engines.", error)
        if record is not None and not source.override:
            record.engine_version = version
        self.last_timings = clock.laps
        return version

    def _give(self, group: EngineGroup, channel: Channel, version: int, clock: _Clock) -> None:
        """Make the engines receive and load the staged weights. Raises ReplicaLostError if this may be repeated."""
        members: list[Member] = []
        is_loaded = False
        try:
            members = group.members()
            group.connect(members, channel)  # connects new members only
            with group.paused(members):
                clock.lap("pause_s")
                try:
                    group.take(members)
                except Exception as error:
                    raise self._not_taken(group, channel, members, error) from error
                clock.lap("send_s")
                self._last_version = version
                try:
                    group.commit(members, version)
                except Exception as error:
                    raise self._not_loaded(group, channel, members, version, error) from error
                is_loaded = True
                clock.lap("load_s")
            clock.lap("resume_s")
        except WeightSyncError:
            raise
        except Exception as error:
            if is_loaded and not group.are_replaced:
                raise WeightSyncError(
                    f"The engines have the weights of version {version}, but one did not resume: {_brief(error)}"
                ) from error
            raise self._not_taken(group, channel, members, error) from error

    def _not_taken(
        self, group: EngineGroup, channel: Channel, members: list[Member], error: Exception
    ) -> WeightSyncError:
        """End an update that no engine loaded, and return the error, which says what weights the engines hold."""
        why = f"The weight update failed: {_brief(error)}"
        if group.are_replaced:
            return ReplicaLostError(why)
        channel.roll_back()
        is_lost = not channel.can_roll_back and bool(group.engines) and any(not one.is_alive for one in members)
        outcome = group.roll_back(members, are_mixed=not channel.can_roll_back)
        return (ReplicaLostError if is_lost else WeightSyncError)(f"{why} {outcome}")

    def _not_loaded(
        self, group: EngineGroup, channel: Channel, members: list[Member], version: int, error: Exception
    ) -> WeightSyncError:
        """Return the error of an update that only some engines loaded."""
        why = f"The weight update failed while the weights were loaded: {_brief(error)}"
        if group.are_replaced:
            return ReplicaLostError(why)
        if all(engine.policy_version != version for engine in group.engines):
            channel.roll_back()  # a restarted engine must not receive these weights
        return WeightSyncError(
            f"{why} Engines that failed hold a mixture and stay paused until an update succeeds; the other engines "
            f"serve version {version}."
        )

    def _update_together(self, source: ModelWeights) -> int:
        """Share the outcome of an update with all ranks, so that none waits for a rank that failed."""
        outcome: list[int | Exception] = [0]
        source.restart()
        try:
            outcome[0] = self._update(source)
        except Exception as error:
            if self._rank > 0:
                raise
            outcome[0] = error
            source.gather_the_rest()
        torch.distributed.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _share_length(self, source: ModelWeights) -> None:
        """Record the engines' length on every rank, because all ranks must use the same rotary frequencies."""
        length = [None if self._group is None else self._group.first.max_model_len]
        if source.is_sharded:
            torch.distributed.broadcast_object_list(length, src=0)
        if length[0] is not None and (record := self._record()) is not None:
            record.engine_length = length[0]

    def _record(self) -> TrainedModel | None:
        return trained_model(self._model) if isinstance(self._model, torch.nn.Module) else None

    def _compare_dtypes(self, record: TrainedModel) -> None:
        """Warn, once, if engine and trainer compute in different dtypes."""
        if record.disagreement is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(f"Precision: {record.disagreement}", stacklevel=3)


def _require_same(model_metadata: ModelMetadata, given_metadata: ModelMetadata) -> None:
    own = {name: tuple(shape) for name, (_, shape) in model_metadata.items()}
    given = {name: tuple(shape) for name, (_, shape) in given_metadata.items()}
    if own != given:
        differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
        raise ValueError(
            f"model_metadata is not that of the registered model: {len(differing)} weights differ, "
            f"among them {differing[:3]}."
        )


def _brief(error: Exception, limit: int = 400) -> str:
    text = str(error)  # vLLM's message may list every parameter
    return text if len(text) <= limit else f"{text[:limit]} […]"


class _Clock:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = now - self._last
        self._last = now
