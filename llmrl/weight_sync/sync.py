"""`WeightSync`: an update of weights, from the trainer's model to engines that go on generating."""

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
from llmrl.weight_sync.source import ModelMetadata, ModelWeights, get_model_metadata, model_of

logger = logging.getLogger(__name__)


class WeightSyncError(EngineError):
    """An update failed; the message says which weights the engine holds now. It may be tried again."""


class ReplicaLostError(WeightSyncError):
    """Engines died or hung in an update, which can be repeated with those that are left or that take their place."""


class WeightSync:
    """Sends a model's weights to engines: register the model, open the group once, then update at will.

    An update stages the weights in a `Channel` while the engines of an `EngineGroup` generate, pauses them, lets them
    take the weights, and when all have, lets them load and go on. Made by a scheme's `create_sender`.

    In a trainer of several processes each has one, with its rank: rank 0's has the engines, the others call the same
    methods without an engine, so that sharded weights can be gathered.

    Args:
        open_channel: how weights travel to engines with a weight-transfer backend, or with none to wherever engines
            read them by themselves.
        pause_mode, reset_running_requests, rank: see `VLLMWeightSyncScheme`.
        needs_engine: whether an engine has to be notified of the weights.
        make_source: what reads the model's weights, or its adapters, in the engines' dtype.
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
        self._model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
        self._source: ModelWeights | None = None
        self._group: EngineGroup | None = None
        self._channel: Channel | None = None
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmrl-weight-update")
        self._is_copied: threading.Event | None = None
        self._last_version = 0
        """The highest that an engine may have put to use: other weights never get it, also where those engines are
        gone. What the engines that are here hold they say themselves."""
        self._has_warned = False
        self.last_timings: dict[str, float] = {}
        """Seconds of the parts of the last update: `stage_s` (the engines generate), `pause_s`, `send_s` (the workers
        take and check), `load_s` (they put to use and empty their prefix caches), `resume_s`."""

    def register_model(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Set the source of weights: a model, the policy that it is of, or a mapping of checkpoint names to tensors.

        They are read at each update. Adapters (peft's LoRA) are merged on the way, or sent alone where the scheme says
        so; the model is left as it is.
        """
        with self._lock:
            self._model = model_of(model)
            if self._source is not None:
                self._open()

    def init_all_workers_group(
        self,
        model_metadata: ModelMetadata | None = None,
        engine: UpdatableEngine | Sequence[UpdatableEngine] | None = None,
        *,
        vllm_engine: UpdatableEngine | Sequence[UpdatableEngine] | None = None,
    ) -> None:
        """Open the way to the workers of an engine, or of several that are to hold the same weights.

        Replicas that start again later (`EngineReplicas`) are given the current weights before they serve. Engines that
        compute in another dtype than the model's policy cause a warning that says what to do.

        Args:
            model_metadata: from `get_model_metadata`; checked against the registered model.
            engine: an `AsyncVLLM`, a sequence of them, or `EngineReplicas`; `None` on ranks above 0.
            vllm_engine: the same, by TorchRL's name.

        Raises:
            RuntimeError: without a registered model.
            ValueError: when the metadata is of another model, or an engine cannot take the weights.
            EngineError: when a worker cannot be reached, or its model is another one.
        """
        engine = vllm_engine if engine is None else engine
        if self._model is None:
            raise RuntimeError("no model is registered; call sender.register_model(model) first.")
        if engine is None and self._rank == 0 and self._needs_engine:
            raise ValueError("engine must be an AsyncVLLM or a sequence of them, got None.")
        if engine is not None and self._rank > 0:
            raise ValueError(f"rank {self._rank} has no engine: rank 0 sends, the others help to gather.")
        with self._lock:
            if self._group is not None:
                self._group.shutdown()
                self._group = None
            if engine is not None:
                self._group = EngineGroup(
                    engine, pause_mode=self._pause_mode, reset_running_requests=self._reset_running_requests
                )
            self._open()
            if model_metadata is not None:
                _require_same(get_model_metadata(self._model), model_metadata)
            if self._group is None or self._channel is None:
                return
            self._last_version = max(self._last_version, self._group.last_version)  # the list may forget its dead
            if (record := self._record()) is not None:
                record.engine_dtype = self._group.model_dtype
                record.is_engine_int8 = self._group.is_quantized
                if record.engine_version is None:  # both hold the weights that they started with
                    record.engine_version = self._group.policy_version
                self._compare_dtypes(record)
            self._group.connect(self._group.members(), self._channel)
            self._group.call_before_serving(self.bring_up_to_date)

    def update_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Put the model's weights (or `weights`, by checkpoint name) into the engines; return their version.

        Requests in flight are treated as the scheme says, none is lost. The engines count the version. Blocks; in an
        event loop use `asyncio.to_thread`. Engines that died are left out; where all of them did and `EngineReplicas`
        starts others, the update waits for one.

        Raises RuntimeError before `init_all_workers_group`, and WeightSyncError if an engine refuses; the message says
        which weights the engines hold now.
        """
        with self._lock:
            if self._source is None:
                raise RuntimeError("the workers are not reached yet; call sender.init_all_workers_group(...) first.")
            self._source.override = weights or {}
            while True:
                try:
                    return (
                        self._update_together(self._source) if self._source.is_sharded else self._update(self._source)
                    )
                except ReplicaLostError as error:  # each time there is one less, or one restart less
                    logger.warning("%s The update is repeated with the engines that are left.", error)

    def start_update(self, weights: Mapping[str, torch.Tensor] | None = None) -> Future[int]:
        """Do what `update_weights` does, but return as soon as training may go on: the engines take a copy meanwhile.

        What is not copied first (NCCL, CUDA IPC) is sent before it returns, and so are sharded weights. The future has
        the version, or the error.
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
        """Give an engine that missed updates the weights that the others were sent last, with their version.

        Raises EngineError if the engine dies before an update that is under way ends, and WeightSyncError if they are
        not held any more; the next update reaches the engine too.
        """
        with held_for(engine, self._lock):
            group = self._group
            channel = self._channel
            if group is None or channel is None:
                raise RuntimeError("the workers are not reached yet; call sender.init_all_workers_group(...) first.")
            version = max(one.policy_version for one in [*group.engines, engine])
            staged = channel.staged_version
            if staged is not None and staged <= self._last_version:  # the others may all have died since
                version = max(version, staged)
            if engine.policy_version == version:
                return
            if channel.staged_version != version:
                raise WeightSyncError(
                    f"the weights of version {version} are not held by this trainer; the engine may serve after the "
                    "next update."
                )
            members = [group.member_of(engine)]
            group.connect(members, channel)
            with group.paused(members):
                group.take(members)
                group.commit(members, version)

    def shutdown(self) -> None:
        """Release memory, communicators and threads; the engines stay. May be called twice."""
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
        is_quantized = self._group is not None and self._group.is_quantized
        make_source = Int8Weights if is_quantized else self._make_source
        source = self._source = make_source(self._model, None if self._group is None else self._group.model_dtype)
        if self._rank == 0:
            self._channel = self._open_channel(source, None if self._group is None else self._group.backend)
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
            self._compare_dtypes(record)  # its policy may be younger than this sender
            # what is trained from here on is not sent
            record.engine_version = None
            record.num_updates = 0
        group.members()  # where none lives, what is staged stays what the engines were sent last
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
                logger.warning("%s It is repeated with engines that are started in their place.", error)
        if record is not None and not source.override:
            record.engine_version = version
        self.last_timings = clock.laps
        return version

    def _give(self, group: EngineGroup, channel: Channel, version: int, clock: _Clock) -> None:
        """Let the engines take what is staged, load it and go on.

        Raises ReplicaLostError if it may be repeated, from where the channel still holds the weights, and
        WeightSyncError if an engine refuses, or none is left.
        """
        members: list[Member] = []
        is_loaded = False
        try:
            members = group.members()
            group.connect(members, channel)  # those that are new
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
                    f"The engines hold the weights of version {version}, and one did not go on: {_brief(error)}"
                ) from error
            raise self._not_taken(group, channel, members, error) from error

    def _not_taken(
        self, group: EngineGroup, channel: Channel, members: list[Member], error: Exception
    ) -> WeightSyncError:
        """End an update that no engine loaded, and say what the engines hold."""
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
        """Say what the engines hold of which some loaded the weights and some did not."""
        why = f"The weight update failed while the weights were loaded: {_brief(error)}"
        if group.are_replaced:
            return ReplicaLostError(why)
        if all(engine.policy_version != version for engine in group.engines):
            channel.roll_back()  # else an engine that starts again is given these
        return WeightSyncError(
            f"{why} Engines that failed hold a mixture and stay paused until an update succeeds; the others serve "
            f"version {version}."
        )

    def _update_together(self, source: ModelWeights) -> int:
        """Tell every rank what became of the update, so that none waits for a peer that has given up."""
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

    def _record(self) -> TrainedModel | None:
        return trained_model(self._model) if isinstance(self._model, torch.nn.Module) else None

    def _compare_dtypes(self, record: TrainedModel) -> None:
        """Warn, once, where engine and trainer do not compute in the same dtype."""
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
    text = str(error)  # vLLM lists every parameter it knows
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
