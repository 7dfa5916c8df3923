"""`VLLMWeightSender`: the trainer's end of a weight update."""

from __future__ import annotations

import logging
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from llmrl.trainer.trained_model import TrainedModel, trained_model
from llmrl.weight_sync.scheme import WeightSyncError
from llmrl.weight_sync.source import ModelMetadata, is_sharded, make_weight_source

if TYPE_CHECKING:
    from llmrl.weight_sync.receiver import VLLMWeightReceiver
    from llmrl.weight_sync.scheme import VLLMWeightSyncScheme
    from llmrl.weight_sync.transport import WeightTransport

logger = logging.getLogger(__name__)


class VLLMWeightSender:
    """Sends a model's weights to engines: register the model, open the group once, then update at will.

    In a trainer of several processes each has a sender, with its rank in the scheme: rank 0's has the engines, the
    others call the same methods without an engine, so that sharded weights can be gathered.
    """

    _may_lack_engine = False

    def __init__(self, scheme: VLLMWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: torch.nn.Module | Mapping[str, torch.Tensor] | None = None
        self._source: Any = None
        self._receiver: VLLMWeightReceiver | None = None
        self._transport: WeightTransport | None = None
        self._hooks: list[Any] | None = None
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llmrl-weight-update")
        self._is_copied: threading.Event | None = None
        self._sent_version: int | None = None
        self._has_warned = False
        self.last_timings: dict[str, float] = {}
        """Seconds of the parts of the last update: `stage_s` (the engines generate), `pause_s`, `send_s` (the workers
        take and check), `load_s` (they put to use and empty their prefix caches), `resume_s`."""

    def register_model(self, model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Say whose weights to send: a module, or a mapping of checkpoint names to tensors, read at each update.

        Adapters (peft's LoRA) are merged on the way; the model is left as it is.
        """
        with self._lock:
            self._model = model
            self._override: dict[str, torch.Tensor] = {}
            if self._receiver is not None or self._transport is not None:
                self._open()

    def init_all_workers_group(
        self, model_metadata: ModelMetadata | None = None, engine: Any | Sequence[Any] = None
    ) -> None:
        """Open the way to the workers of an engine, or of several that are to hold the same weights.

        Replicas that start again later (`EngineReplicas`) are given the current weights before they serve. Engines that
        compute in another dtype than the model's policy are warned of, with the mend.

        Args:
            model_metadata: from `get_model_metadata`; checked against the registered model.
            engine: an `AsyncVLLM`, a sequence of them, or `EngineReplicas`; `None` on ranks above 0.

        Raises:
            RuntimeError: without a registered model.
            ValueError: when the metadata is of another model, or an engine cannot take the weights.
            EngineError: when a worker cannot be reached, or its model is another one.
        """
        if self._model is None:
            raise RuntimeError("no model is registered; call sender.register_model(model) first.")
        if engine is None and self._scheme.rank == 0 and not self._may_lack_engine:
            raise ValueError("engine must be an AsyncVLLM or a sequence of them, got None.")
        if engine is not None and self._scheme.rank > 0:
            raise ValueError(f"rank {self._scheme.rank} has no engine: rank 0 sends, the others help to gather.")
        with self._lock:
            self._receiver = None if engine is None else self._scheme.create_receiver(engine)
            self._open()
            if model_metadata is not None:
                self._check(model_metadata)
            if (record := self._record()) is not None and self._receiver is not None:
                record.engine_dtype = self._receiver.model_dtype
                if record.engine_version is None:  # both hold the weights that they started with
                    record.engine_version = self._receiver.policy_version
                self._compare_dtypes(record)
            if self._receiver is not None and self._transport is not None:
                self._transport.open(self._receiver, self._receiver.links())
            hooks = getattr(engine, "before_serving", None)
            if isinstance(hooks, list) and self.bring_up_to_date not in hooks:
                hooks.append(self.bring_up_to_date)
                self._hooks = hooks

    def update_weights(self, weights: Mapping[str, torch.Tensor] | None = None) -> int:
        """Put the model's weights (or `weights`, by checkpoint name) into the engines; return their version.

        Requests in flight are treated as the scheme says, none is lost. The engines count the version. Blocks; in an
        event loop use `asyncio.to_thread`. Engines that died are left out.

        Raises:
            RuntimeError: before `init_all_workers_group`.
            WeightSyncError: when an engine refuses; the message says which weights the engines hold now.
        """
        with self._lock:
            if self._source is None:
                raise RuntimeError("the workers are not reached yet; call sender.init_all_workers_group(...) first.")
            self._override.clear()
            self._override.update(weights or {})
            if not is_sharded(self._model):
                return self._update()
            return self._update_together()

    def start_update(self, weights: Mapping[str, torch.Tensor] | None = None) -> Future[int]:
        """As `update_weights`, but training may go on as soon as this returns: the engines take a copy meanwhile.

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

    def bring_up_to_date(self, engine: Any) -> None:
        """Give an engine that missed updates the weights that the others were sent last, with their version.

        Raises:
            WeightSyncError: when they are not held any more; the next update reaches the engine too.
        """
        with self._lock:
            if self._receiver is None or self._transport is None:
                raise RuntimeError("the workers are not reached yet; call sender.init_all_workers_group(...) first.")
            version = max(one.policy_version for one in [*self._receiver.engines, engine])
            version = max(version, self._sent_version or 0)  # they may all have died since
            if engine.policy_version == version:
                return
            if self._sent_version is None:  # all of them hold the weights that they started with
                engine.policy_version = version
                return
            if not self._transport.can_catch_up:
                raise WeightSyncError(
                    f"the weights of version {version} are not held by this trainer; the engine may serve after the "
                    "next update."
                )
            links = [self._receiver.link_to(engine)]
            self._transport.open(self._receiver, list(dict.fromkeys([*self._receiver.links(), *links])))
            with self._receiver.paused(links):
                self._transport.send(self._receiver, links)
                self._receiver.commit(links, version)

    def shutdown(self) -> None:
        """Release memory, communicators and threads; the engines stay. May be called twice."""
        self._pool.shutdown()
        with self._lock:
            if self._hooks is not None:
                self._hooks.remove(self.bring_up_to_date)
            if self._transport is not None:
                self._transport.shutdown()
            if self._receiver is not None:
                self._receiver.shutdown()
            self._transport = self._receiver = self._source = self._hooks = None

    def _open(self) -> None:
        assert self._model is not None
        if self._transport is not None:
            self._transport.shutdown()
            self._transport = None
        dtype = None if self._receiver is None else self._receiver.model_dtype
        self._source = make_weight_source(self._model, dtype, override=self._override)
        if self._scheme.rank == 0:
            backend = None if self._receiver is None else self._receiver.backend
            self._transport = self._scheme.create_transport(backend, self._source)

    def _check(self, model_metadata: ModelMetadata) -> None:
        own = {meta.name: tuple(meta.shape) for meta in self._source.metadata()}
        given = {name: tuple(shape) for name, (_, shape) in model_metadata.items()}
        if own != given:
            differing = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
            raise ValueError(
                f"model_metadata is not that of the registered model: {len(differing)} weights differ, "
                f"among them {differing[:3]}."
            )

    def _update(self) -> int:
        transport, receiver = self._transport, self._receiver
        if transport is None:  # a rank above 0
            for _ in self._source.uncast():
                pass
            return -1
        clock = _Clock()
        assert receiver is not None
        version = max(receiver.next_version, (self._sent_version or 0) + 1)
        record = self._record()
        if record is not None:
            self._compare_dtypes(record)  # its policy may be younger than this sender
            record.engine_version, record.num_updates = None, 0  # what is trained from here on is not sent
        transport.stage(version)
        clock.lap("stage_s")
        if self._is_copied is not None and transport.supports_rollback and not is_sharded(self._model):
            self._is_copied.set()
        links = receiver.links()
        try:
            transport.open(receiver, links)  # those that are new
        except Exception as error:
            transport.rollback()
            raise WeightSyncError(f"The weight update failed: {_brief(error)} {self._abandon([])}") from error
        with receiver.paused(links):
            clock.lap("pause_s")
            try:
                transport.send(receiver, links)
            except Exception as error:
                transport.rollback()
                raise WeightSyncError(f"The weight update failed: {_brief(error)} {self._abandon(links)}") from error
            clock.lap("send_s")
            try:
                receiver.commit(links, version)
            except Exception as error:
                transport.rollback()
                raise WeightSyncError(
                    f"The weight update failed while the weights were loaded: {_brief(error)} Engines that failed "
                    f"hold a mixture and stay paused until an update succeeds; the others serve version {version}."
                ) from error
            self._sent_version = version
            if record is not None and not self._override:
                record.engine_version = version
            clock.lap("load_s")
        clock.lap("resume_s")
        self.last_timings = clock.laps
        return version

    def _update_together(self) -> int:
        """On every rank: all learn what became of the update, so that none waits for a peer that has given up."""
        outcome: list[Any] = [None]
        self._source.restart()
        try:
            outcome[0] = self._update()
        except Exception as error:
            if self._scheme.rank > 0:
                raise
            outcome[0] = error
            self._source.gather_the_rest()
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

    def _abandon(self, links: list[Any]) -> str:
        assert self._receiver is not None and self._transport is not None
        supports_rollback = self._transport.supports_rollback or not links
        version = self._receiver.policy_version
        try:
            self._receiver.abandon(links, are_mixed=not supports_rollback)
        except Exception as error:
            logger.warning("ending the failed update failed too: %s", error)
        if supports_rollback:
            return f"The engines hold the weights of version {version} as before; mend the cause and try again."
        return "The engines hold a mixture of weights and stay paused until an update succeeds."


class VLLMDoubleBufferWeightSender(VLLMWeightSender):
    """Writes a model's weights to a double buffer and makes engines read them.

    Given no engine it only writes, and returns the version that it wrote: engines read by themselves then.
    """

    _may_lack_engine = True

    def _update(self) -> int:
        if self._receiver is not None or self._transport is None:
            return super()._update()
        self._transport.stage(None)
        return self._transport.staged.pointer.version


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
