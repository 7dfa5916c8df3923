"""`EngineGroup`: engines that all receive new weights before any engine loads them."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from llmrl.engines.base import EngineError, PauseMode, UpdatableEngine
from llmrl.engines.hang_detector import DEFAULT_HANG_TIMEOUT_SECONDS
from llmrl.engines.replicas import EngineReplicas, end_hanging
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND, LLMRL_BACKEND
from llmrl.engines.vllm.quantized import INT8
from llmrl.weight_sync.deadline import TRANSFER_SECONDS
from llmrl.weight_sync.member import AllWorkers, Member, last_version_of

if TYPE_CHECKING:
    from llmrl.weight_sync.channels import Channel, Connection

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
"""Polling interval while engines start or wait for the end of an update."""
_END_SECONDS = 60.0
"""Timeout for the calls of a killed engine to fail."""


class EngineGroup:
    """Engines that hold the same weights and are updated together; not thread-safe.

    Dead engines are left out. A sequence of engines is read again at each update, so that
    replacements are included. An engine that neither answers a call nor produces tokens within
    `hang_timeout_seconds` (of `EngineReplicas`, otherwise 300) is killed and left out.

    Raises EngineError if no engine is alive, and ValueError if there are no engines, or one cannot take the weights.
    """

    def __init__(
        self,
        engines: UpdatableEngine | Sequence[UpdatableEngine],
        *,
        pause_mode: PauseMode = "keep",
        reset_running_requests: bool = True,
    ) -> None:
        self._engines = engines if isinstance(engines, Sequence) else [engines]
        if not len(self._engines):
            raise ValueError("engine must be an engine or a non-empty sequence of engines, got an empty sequence.")
        self._replicas = engines if isinstance(engines, EngineReplicas) else None
        self._pause_mode = pause_mode
        self._reset_running_requests = reset_running_requests
        self._members: dict[int, Member] = {}
        self._shared: tuple[list[Member], Connection] | None = None
        self._hook: Callable[[UpdatableEngine], None] | None = None
        # One thread per engine, and one that requests the progress of engines that do not answer.
        self._pool = ThreadPoolExecutor(max(4, len(self._engines) + 1), thread_name_prefix="llmrl-weight-sync")
        self.backend = self.members()[0].engine.weight_transfer_backend
        """vLLM's name of the engines' weight-transfer backend."""
        self._takes_adapters = self.backend == ADAPTER_BACKEND

    @property
    def engines(self) -> list[UpdatableEngine]:
        """Engines that are alive."""
        return [engine for engine in self._engines if engine.is_alive]

    @property
    def policy_version(self) -> int:
        """Lowest version of the engines that are alive."""
        return min(engine.policy_version for engine in self.engines or self._engines)

    @property
    def last_version(self) -> int:
        """Highest version that an engine may have loaded, including dead engines."""
        last = 0 if self._replicas is None else self._replicas.last_version
        return max(last, *map(last_version_of, self._engines))

    @property
    def first(self) -> UpdatableEngine:
        """The first engine, alive or dead: all have the same model, dtype and quantisation."""
        return self._engines[0]

    @property
    def are_replaced(self) -> bool:
        """Whether no engine is alive and `EngineReplicas` is starting replacements."""
        return not self.engines and self._replicas is not None and self._replicas.is_alive

    def members(self) -> list[Member]:
        """Return the members of the engines that are alive, waiting for one if all are being restarted.

        Raises EngineError if no engine is alive, and ValueError if one cannot take the weights.
        """
        while self.are_replaced:
            time.sleep(_LOOK_SECONDS)
        engines = self.engines
        if not engines:
            raise EngineError("none of the engines is running; start new ones.")
        members = [self.member_of(engine) for engine in engines]
        for engine in engines:
            _require_alike(engine, engines[0])
        before = self._members
        self._members = {id(one.engine): one for one in members}
        for key in before.keys() - self._members.keys():
            before[key].disconnect()
        return members

    def member_of(self, engine: UpdatableEngine) -> Member:
        """Return the member of an engine, which may be new."""
        member = self._members.get(id(engine))
        if member is None or member.is_left_out or member.num_restarts != getattr(engine, "num_restarts", 0):
            if not isinstance(engine, UpdatableEngine):
                raise ValueError(
                    "engine must be one that takes weights (AsyncVLLM, RayEngine, ServerEngine with weight_sync=True), "
                    f"not {engine!r}."
                )
            if member is not None:
                member.disconnect()
            # The member keeps its engine alive, so the id stays unique.
            member = self._members[id(engine)] = Member(engine)
        return member

    def call_before_serving(self, hook: Callable[[UpdatableEngine], None]) -> None:
        """Make `EngineReplicas` call `hook` with each engine that replaces a dead one."""
        if self._replicas is not None:
            self._hook = hook
            self._replicas.before_serving.append(hook)

    def connect(self, members: list[Member], channel: Channel) -> None:
        """Connect to new members. Raises EngineError if a worker cannot be reached, or has another model."""
        if not channel.is_collective:

            def reach(member: Member) -> None:
                if member.connection is None:
                    member.connection = channel.connect(member)

            self.each(members, reach)  # for all members: if only a new one dies, `each` must not see all as dead
        elif self._shared is None or self._shared[0] != members:
            self.disconnect()
            timeout = min(TRANSFER_SECONDS, (self._hang_timeout_seconds or math.inf) / 3)
            self._shared = members, channel.connect(AllWorkers(members, self.each, timeout))

    def disconnect(self) -> None:
        """Close the connections."""
        shared = self._shared
        self._shared = None
        if shared is not None:
            shared[1].shutdown()
        for member in self._members.values():
            member.disconnect()

    @contextlib.contextmanager
    def paused(self, members: list[Member]) -> Iterator[None]:
        """Pause the engines within the context; engines with a mixture of weights are not resumed.

        Engines that take adapters are not paused with `pause_mode="keep"`, as each request keeps its own adapter.
        """
        if self._takes_adapters and self._pause_mode == "keep":
            yield
            return
        try:
            self.each(members, lambda member: member.engine.pause(self._pause_mode, clear_cache=False))
            yield
        except BaseException:
            with contextlib.suppress(EngineError):  # the caller needs the first error
                self._resume(members)
            raise
        self._resume(members)

    def take(self, members: list[Member]) -> None:
        """Transfer the staged weights to the engines. Raises EngineError if an engine that is alive fails."""
        try:
            if self._shared is not None:
                self._shared[1].send_weights()
            else:
                self.each(members, _take)
        except BaseException:
            self.disconnect()  # a failed transfer leaves its group in an unknown state
            raise

    def commit(self, members: list[Member], version: int) -> None:
        """Make every engine load the received weights and drop the key-value blocks of the old ones.

        Raises EngineError if an engine that is alive fails; it stays paused while other engines serve the new weights.
        """

        def finish(member: Member) -> None:
            member.mark_mixed(version)
            member.commit(version)
            self._reset_prefix_cache(member.engine)
            member.mark_whole()

        try:
            self.each(members, finish)
        finally:
            if self._replicas is not None:
                self._replicas.refresh()

    def roll_back(self, members: list[Member], *, are_mixed: bool) -> str:
        """End an update that failed before `commit`; return `held_weights`. Mixed engines stay paused."""
        try:
            self.each(members, lambda member: member.abandon(can_discard=not are_mixed))
        except Exception as error:
            logger.warning("an engine could not end the failed update: %s", error)
        if are_mixed:
            for member in members:
                member.mark_mixed(member.engine.policy_version)
        return self.held_weights(members)

    def held_weights(self, members: list[Member]) -> str:
        """Return a sentence on the weights that the engines hold after a failed update."""
        members = [member for member in members if member.engine.is_alive]
        if not members:
            return "None of the engines is running; start new ones."
        whole = [member.engine.policy_version for member in members if member.is_whole]
        if not whole:
            return "No engine holds a complete set of weights; they stay paused until an update succeeds."
        held = f"The engines hold the weights of version {min(whole)} as before; remove the cause and try again."
        if len(whole) < len(members):
            held += (
                f" {len(members) - len(whole)} of them failed to load an earlier update and stay paused until an "
                "update succeeds."
            )
        return held

    def each(self, members: Sequence[Member], action: Callable[[Member], object]) -> None:
        """Run `action` for all engines concurrently; then raise the error of an engine that is alive, if any.

        Engines that die or hang are left out from then on. Raises EngineError if no engine is left.
        """
        futures = {self._pool.submit(action, member): member for member in members if not member.is_left_out}
        hanging = self._end_hanging(futures)
        errors: list[tuple[Member, BaseException]] = [*hanging.items()]
        for future, member in futures.items():
            if member not in hanging and (error := future.exception()) is not None:
                errors.append((member, error))
        living = []
        for member, error in errors:
            if member not in hanging and member.is_alive:
                living.append(error)
                continue
            member.is_left_out = True
            logger.warning("an engine died during a weight update and is left out: %s", error)
        if errors and self._replicas is not None:
            self._replicas.refresh()  # a restarted server may answer, without its weights, before the update ends
        if living:
            raise living[0]
        if members and all(member.is_left_out for member in members):
            cause = errors[0][1] if errors else None
            raise EngineError(f"every engine died during the weight update: {cause or 'in an earlier step'}") from cause

    def shutdown(self) -> None:
        """Release threads and connections, but not the engines."""
        if self._replicas is not None and self._hook is not None:
            self._replicas.before_serving.remove(self._hook)
            self._hook = None
        self.disconnect()
        self._pool.shutdown(wait=False)

    @property
    def _hang_timeout_seconds(self) -> float | None:
        return DEFAULT_HANG_TIMEOUT_SECONDS if self._replicas is None else self._replicas.hang_timeout_seconds

    def _end_hanging(self, calls: dict[Future[object], Member]) -> dict[Member, EngineError]:
        """Wait for the engines' calls, and kill engines that hang; return the error of each."""
        timeout = self._hang_timeout_seconds
        running = set(calls)
        hanging = set()
        seen: dict[Member, int | None] = {}
        while running := wait(running, timeout).not_done:
            for call in list(running):
                member = calls[call]
                progress = self._pool.submit(member.progress).result()
                # An engine that finishes its requests before it pauses still produces tokens.
                if progress is None or progress == seen.get(member):
                    self._end(member.engine)
                    hanging.add(call)
                seen[member] = progress
            running -= hanging
        wait(hanging, _END_SECONDS)
        return {
            calls[call]: EngineError(f"the engine did not answer for {timeout:g} s and was ended.") for call in hanging
        }

    def _end(self, engine: UpdatableEngine) -> None:
        if self._replicas is not None:
            self._replicas.replace_hanging(engine)
        else:
            end_hanging(engine)

    def _resume(self, members: list[Member]) -> None:
        self.each([member for member in members if member.is_whole], lambda member: member.engine.resume())

    def _reset_prefix_cache(self, engine: UpdatableEngine) -> None:
        if self._takes_adapters:  # vLLM's prefix cache is separate for each adapter
            return
        reset = self._reset_running_requests
        if not engine.reset_prefix_cache(reset_running_requests=reset) and reset:
            raise EngineError("vLLM did not reset its prefix cache; key-value blocks of old weights may be used.")


@contextlib.contextmanager
def held_for(engine: UpdatableEngine, lock: threading.RLock) -> Iterator[None]:
    """Hold the lock of updates for an engine that waits for its weights. Raises EngineError if the engine dies."""
    while not lock.acquire(timeout=_LOOK_SECONDS):
        if not engine.is_alive:
            raise EngineError("the engine died before it received the current weights.")
    try:
        yield
    finally:
        lock.release()


def _take(member: Member) -> None:
    if member.connection is None:
        raise EngineError("the engine is not connected yet.")
    member.connection.send_weights()


def _require_alike(engine: UpdatableEngine, first: UpdatableEngine) -> None:
    backend = engine.weight_transfer_backend
    if backend is None:
        raise ValueError("an engine was started with weight_transfer=False; start it with weight_transfer=True.")
    if engine.quantization is not None and (engine.quantization != INT8 or backend != LLMRL_BACKEND):
        raise ValueError(
            f"an engine is quantised ({engine.quantization}, weight_transfer={backend!r}): the trainer's weights are "
            f"rounded for {INT8!r} on a CPU alone (AsyncVLLM.from_pretrained(quantization={INT8!r})), with "
            f"weight_transfer={LLMRL_BACKEND!r}; start the engine without quantization."
        )
    for name, own, other in (
        ("weight-transfer backend", backend, first.weight_transfer_backend),
        ("dtype", engine.model_dtype, first.model_dtype),
        ("quantization", str(engine.quantization), str(first.quantization)),
    ):
        if own != other:
            raise ValueError(f"engines that are to hold the same weights must share one {name}, got {own} and {other}.")
