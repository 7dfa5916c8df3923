"""`EngineReplicas`: several engines with the same weights, used as one fault-tolerant engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from llmrl.engines.base import (
    Completion,
    Engine,
    EngineError,
    HasTokenizer,
    SamplingConfig,
    TakesGrammars,
    UpdatableEngine,
    check_supported,
    check_unique,
)
from llmrl.engines.hang_detector import DEFAULT_HANG_TIMEOUT_SECONDS, HangDetector, HangWatch
from llmrl.engines.launch import start_engines
from llmrl.engines.pending import PendingRequest, Waiters
from llmrl.engines.router import NoReplicaError, Router
from llmrl.engines.scores import ScoresTokens, TokenScores
from llmrl.engines.token_stream import TokenStream, is_streaming
from llmrl.engines.vllm.arguments import EngineOptions
from llmrl.engines.vllm.engine import AsyncVLLM

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EngineT = TypeVar("EngineT", bound=Engine)
T = TypeVar("T")
_LOOK_AGAIN_S = 0.1
"""Seconds between checks of the replicas while some do not serve."""


class EngineReplicas(Sequence[EngineT]):
    """Several engines used as one: a `Router` distributes requests, and those that fail are retried elsewhere.

    With `restart`, a dead replica is replaced by a new engine. A replica serves only if it has the
    same version of the weights as the others; `before_serving` callbacks bring a new one to that
    version. The sequence of engines can be passed to `sender.init_all_workers_group`.

    Args:
        engines: engines of the same model; the smallest `max_model_len` applies to all.
        max_imbalance: see `Router`.
        num_retries: maximum number of retries of a request that fails with an EngineError.
        restart: function that starts a replacement, given the replica's index; called in a thread.
        max_restarts: maximum number of restarts of a replica without a completion in between.
        hang_timeout_seconds: time after which a replica that has requests but no new token, or that does not finish a
            step of a weight update, is ended and replaced. Other pauses do not count. None waits forever.

    Raises ValueError if there are no engines, or a number is out of range.

    Example:
        >>> import asyncio
        >>> from llmrl.engines import SamplingConfig
        >>> from llmrl.testing import ScriptedEngine
        >>> engines = EngineReplicas([ScriptedEngine([[1]]), ScriptedEngine([[2]])])
        >>> ask = lambda: asyncio.run(engines.generate([5], SamplingConfig(), routing_key="group")).token_ids
        >>> ask(), engines[0].shutdown(), ask()
        ([1], None, [2])
    """

    def __init__(
        self,
        engines: Sequence[EngineT],
        *,
        max_imbalance: int = 32,
        num_retries: int = 2,
        restart: Callable[[int], EngineT] | None = None,
        max_restarts: int = 3,
        hang_timeout_seconds: float | None = DEFAULT_HANG_TIMEOUT_SECONDS,
    ) -> None:
        if not engines:
            raise ValueError("engines must not be empty.")
        if min(num_retries, max_restarts) < 0:
            raise ValueError(f"num_retries and max_restarts must not be negative, got {num_retries}, {max_restarts}.")
        self.before_serving: list[Callable[[EngineT], None]] = []
        """Functions called in a thread with a replacement engine before it serves."""
        self.num_deaths = 0
        """Number of engines found dead or hanging."""
        self.num_hangs = 0
        """Number of engines found hanging."""
        self.num_restarts = 0
        """Number of replacement engines started."""
        self.num_retried = 0
        """Number of retries of requests."""
        self.max_model_len: int = min(engine.max_model_len for engine in engines)
        """Maximum number of tokens of prompt and completion together."""
        self.vocab_size = engines[0].vocab_size
        self._engines = list(engines)
        self.router = Router(len(engines), max_imbalance=max_imbalance)
        self._num_retries = num_retries
        self._restart = restart
        self._max_restarts = max_restarts
        self._restarts_in_a_row = [0] * len(engines)
        self._dead: set[int] = set()
        self.recovering: dict[int, threading.Thread] = {}
        """Threads that start replacements, by replica."""
        self._unproven: set[int] = set()  # restarted replicas that have not yet had the current weights
        self._first_version: int | None = None  # initial version of the weights, if the caller set it
        self._version = self.last_version = max(engine.policy_version for engine in engines)
        self._are_all_open = True
        self._looked_s = -_LOOK_AGAIN_S
        self._pending: dict[str, PendingRequest] = {}
        self._waiters = Waiters()
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self.hang_timeout_seconds = hang_timeout_seconds
        self.is_shut_down = False
        self._watch = None if hang_timeout_seconds is None else HangDetector(hang_timeout_seconds)
        self._watching: asyncio.Task[None] | None = None

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError for sampling parameters that the engines do not support."""
        check_supported(self._engines[0], sampling)

    @property
    def takes_grammars(self) -> bool:
        """Whether all engines follow `SamplingConfig.grammar`."""
        return all(isinstance(one, TakesGrammars) and one.takes_grammars for one in self._engines)

    @property
    def streams_tokens(self) -> bool:
        """Whether all engines report the tokens of a request while they sample them."""
        return all(map(is_streaming, self._engines))

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        num_replicas: int = 1,
        *,
        use_ray: bool = False,
        ray_options: Mapping[str, object] | None = None,
        ray_init_config: Mapping[str, object] | None = None,
        **options: Unpack[EngineOptions],
    ) -> EngineReplicas[UpdatableEngine]:
        """Start vLLM engines (`AsyncVLLM`) of one model, which are replaced if they die.

        Args:
            model_name: folder or hub name.
            num_replicas: number of engines; local ones share this process's devices and cores.
            use_ray: whether to start each engine in a Ray actor.
            ray_options: options of each actor, such as `{"num_gpus": 1}`; by default one CPU core.
            ray_init_config: arguments of `ray.init`, such as `{"address": "auto"}`, if this process is not connected.
            options: see `llmrl.engines.vllm.arguments.EngineOptions`.

        Raises:
            TypeError: if an option is unknown; the message names the nearest option.
            ValueError: if `num_replicas` is below 1, or a Ray option is given without `use_ray`.
            EngineError: if an engine does not start; the other engines are ended.
        """
        hang_timeout_seconds = options.get("hang_timeout_seconds", DEFAULT_HANG_TIMEOUT_SECONDS)
        HangWatch(hang_timeout_seconds)  # checks the value before the engines start
        engines, start = start_engines(model_name, num_replicas, use_ray, ray_options, ray_init_config, options)
        return EngineReplicas(engines, restart=start, hang_timeout_seconds=hang_timeout_seconds)

    def __len__(self) -> int:
        return len(self._engines)

    @overload
    def __getitem__(self, index: int) -> EngineT: ...
    @overload
    def __getitem__(self, index: slice) -> list[EngineT]: ...
    def __getitem__(self, index: int | slice) -> EngineT | list[EngineT]:
        return self._engines[index]

    @property
    def policy_version(self) -> int:
        """Version of the weights that all living replicas have reached."""
        if self._are_all_open or time.monotonic() - self._looked_s > _LOOK_AGAIN_S:  # limits the rate of checks
            self.refresh()
        return min((engine.policy_version for engine in self._living()), default=self._version)

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version from which updates are counted, when a run is resumed."""
        self._first_version = self.last_version = version  # the highest version seen
        for engine in self:
            engine.policy_version = version
        self.refresh()

    @property
    def is_alive(self) -> bool:
        """Whether any replica serves requests or is being restarted."""
        self.refresh()
        return not self.is_shut_down and bool(self.router.open_replicas or self.recovering)

    @property
    def loads(self) -> tuple[int, ...]:
        """Number of requests per replica."""
        return self.router.loads

    @property
    def serving(self) -> frozenset[int]:
        """Replicas that serve requests now."""
        self.refresh()
        return self.router.open_replicas

    def refresh(self) -> None:
        """Check which replicas live and have the current weights, and let only these serve.

        To be called after a weight update.
        """
        if self._are_all_open and all(e.is_alive and e.policy_version == self._version for e in self._engines):
            return
        with self._lock:
            self._looked_s = time.monotonic()
            for index, engine in enumerate(self._engines):
                if index not in self._dead and not engine.is_alive:
                    self._mark_dead(index)
                elif index in self._dead and index not in self.recovering and engine.is_alive:
                    self._recover_by(self._bring_back, index, engine)  # a server that answers again
            self.last_version = max(self.last_version, *(engine.policy_version for engine in self._engines))
            versions = {i: e.policy_version for i, e in enumerate(self._engines) if i not in self._dead}
            # A restarted replica does not count until it has reached the highest version of the other replicas.
            proven = [version for index, version in versions.items() if index not in self._unproven]
            version = max(proven, default=self._version)
            self._unproven = {index for index in self._unproven if versions.get(index, -1) < version}
            self._version = max((v for i, v in versions.items() if i not in self._unproven), default=version)
            for index in range(len(self._engines)):
                is_current = versions.get(index) == self._version
                if is_current and index not in self._unproven:
                    self.router.open_replica(index)
                else:
                    self.router.close_replica(index)
            self._are_all_open = len(self.router.open_replicas) == len(self._engines)
        self._waiters.wake()

    def shutdown(self) -> None:
        """Shut down all replicas, including those being started. May be called twice."""
        self.is_shut_down = True
        for engine in self:
            engine.shutdown()
        for thread in list(self.recovering.values()):
            thread.join(timeout=120)
        self._waiters.wake()

    def __enter__(self) -> EngineReplicas[EngineT]:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer. Raises TypeError if the engines have none."""
        if not isinstance(first := self._engines[0], HasTokenizer):
            raise TypeError(f"{type(first).__name__} has no tokenizer; pass one to the policy.")
        return first.get_tokenizer()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Sample one completion on one of the replicas; waits while all are being restarted.

        Raises ValueError as the replica's `generate` does, and EngineError if the request failed
        `num_retries` + 1 times, or no replica serves or is being restarted.
        """
        options: dict[str, Any] = {"routing_key": routing_key}
        if stream is not None:  # engines that do not stream have no such argument
            options["stream"] = stream

        def ask(engine: Engine, attempt_id: str) -> Awaitable[Completion]:
            return engine.generate(prompt_ids, sampling, request_id=attempt_id, **options)

        completion = await self._served(ask, request_id, routing_key)
        return completion or Completion([], [], [], "abort")

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return the scores of `[num_tokens]` tokens by one of the replicas; waits while all are being restarted.

        Raises TypeError if the engines do not score tokens, ValueError as the replica's `score`
        does, and EngineError as `generate` does.
        """

        def ask(engine: Engine, attempt_id: str) -> Awaitable[TokenScores]:
            if not isinstance(engine, ScoresTokens):
                raise TypeError(f"{type(engine).__name__} does not score given tokens; it has no method score.")
            return engine.score(token_ids, top_k=top_k)

        scores = await self._served(ask, None, None)
        assert scores is not None  # the caller does not know the request's id, so nothing can abort it
        return scores

    async def _served(
        self, ask: Callable[[Engine, str], Awaitable[T]], request_id: str | None, routing_key: str | None
    ) -> T | None:
        """Return a replica's answer; None if the request was aborted before it was assigned."""
        if request_id is None:
            request_id = f"replicas-{id(self):x}-{next(self._ids)}"
        check_unique(request_id, self._pending)
        pending = self._pending[request_id] = PendingRequest()
        failed_on: set[int] = set()
        if self._watch is not None and (self._watching is None or self._watching.done()):
            self._watching = asyncio.create_task(self.watch_for_hangs(lambda: bool(self._pending)))
        try:
            for attempt in itertools.count():
                pending.attempt_id = request_id if attempt == 0 else f"{request_id}/retry-{attempt}"
                if (assigned := await self._assign(pending, routing_key, failed_on)) is None:
                    break
                index, engine = assigned
                try:
                    answer = await ask(engine, pending.attempt_id)
                    self._restarts_in_a_row[index] = 0
                    return answer
                except EngineError:
                    failed_on.add(index)
                    self.refresh()
                    if attempt == self._num_retries or self.is_shut_down:
                        raise
                    self.num_retried += 1
                finally:
                    pending.engine = None
                    with self._lock:
                        self.router.release(pending.attempt_id)
        finally:
            del self._pending[request_id]
        return None

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far, or no tokens if it waits for a retry."""
        if (pending := self._pending.get(request_id)) is None:
            return
        pending.is_aborted = True
        if pending.engine is not None:
            await pending.engine.abort(pending.attempt_id)
        else:
            self._waiters.wake()

    async def _assign(
        self, pending: PendingRequest, routing_key: str | None, avoid: set[int]
    ) -> tuple[int, Engine] | None:
        """Assign the request to a live replica with current weights; None if it was aborted."""
        while not pending.is_aborted:
            if not self._are_all_open and time.monotonic() - self._looked_s > _LOOK_AGAIN_S:
                self.refresh()
            with self._lock:
                try:
                    index = self.router.assign(pending.attempt_id, routing_key, avoid=avoid)
                except NoReplicaError as error:
                    if self.is_shut_down or not self.recovering:
                        raise EngineError(self._why_none()) from error
                    waiter = self._waiters.add()
                else:
                    engine = self._engines[index]
                    if engine.is_alive and engine.policy_version == self._version:
                        pending.engine = engine
                        return index, engine
                    self.router.release(pending.attempt_id)
                    self.refresh()
                    continue
            await waiter
        return None

    def _why_none(self) -> str:
        if len(self._dead) == len(self._engines) or self.is_shut_down:
            return f"None of the {len(self._engines)} engines is running; start new ones."
        return (
            f"None of the {len(self._engines)} engines may serve: {len(self._dead)} are dead, and "
            f"{len(self._unproven)} are without weights of version {self._version}; send the weights again."
        )

    def _living(self) -> list[EngineT]:
        return [engine for index, engine in enumerate(self._engines) if index not in self._dead]

    def replace_hanging(self, engine: Engine) -> None:
        """End a hanging engine and start a replacement; returns without waiting for it."""
        with self._lock:
            for index, one in enumerate(self._engines):
                if one is engine and index not in self._dead:
                    seconds = self.hang_timeout_seconds
                    logger.warning("Engine replica %d hung for %g s and is ended.", index, seconds)
                    self.num_hangs += 1
                    return self._mark_dead(index, is_hanging=True)
        end_hanging(engine)  # the engine was just started, and is not a replica yet

    async def watch_for_hangs(self, is_needed: Callable[[], bool] = lambda: True) -> None:
        """Replace hanging engines until `shutdown`; to be called if other processes send the requests."""
        if (watch := self._watch) is None:
            return
        watch.forget()
        while is_needed() and not self.is_shut_down:
            await asyncio.sleep(watch.interval_seconds)
            for engine in await watch.find_hanging(self._living()):
                self.replace_hanging(engine)

    def _mark_dead(self, index: int, *, is_hanging: bool = False) -> None:
        self.num_deaths += not self.is_shut_down
        self._dead.add(index)
        self._unproven.discard(index)
        self._are_all_open = False  # otherwise `refresh` returns early and ignores the successor
        self.router.close_replica(index)
        self.router.forget_affinity(index)
        if self.is_shut_down:
            return
        logger.warning("Engine replica %d died with %d requests.", index, self.router.loads[index])
        # A hanging engine must be ended even if it is not replaced, so that its requests fail and are retried.
        if is_hanging or self._may_restart(index):
            self._recover_by(self._recover, index)

    def _recover_by(self, function: Callable[..., None], index: int, *arguments: EngineT) -> None:
        thread = threading.Thread(target=function, args=(index, *arguments), daemon=True)
        thread.name = f"llmrl-recover-{index}"
        self.recovering[index] = thread
        thread.start()

    def _may_restart(self, index: int) -> bool:
        has_tries = self._restarts_in_a_row[index] < self._max_restarts
        return has_tries and self._restart is not None and not self.is_shut_down

    def _recover(self, index: int) -> None:
        """Start an engine in place of a dead one; runs in its own thread."""
        with contextlib.suppress(Exception):  # the engine is dead; this only cleans up
            if self._restart is None:
                end_hanging(self._engines[index])
            else:
                self._engines[index].shutdown()
        engine = None
        while engine is None and self._restart is not None and self._may_restart(index):
            self._restarts_in_a_row[index] += 1
            try:
                engine = self._restart(index)
                if self._first_version is not None:
                    engine.policy_version = self._first_version
            except Exception:
                logger.exception("Engine replica %d could not be restarted.", index)
        with self._lock:
            if engine is None:
                self.recovering.pop(index)
                return self.refresh()
            self.num_restarts += 1
            self._engines[index] = engine
        self._bring_back(index, engine)

    def _bring_back(self, index: int, engine: EngineT) -> None:
        """Bring a recovered engine to the current weights, so that it may serve."""
        for hook in list(self.before_serving):
            try:
                hook(engine)
            except Exception:
                logger.exception("Engine replica %d was restarted without the current weights.", index)
        with self._lock:
            del self.recovering[index]
            self._dead.discard(index)
            self._unproven.add(index)
            if self.is_shut_down:
                engine.shutdown()
        self.refresh()


def end_hanging(engine: Engine) -> None:
    """End a hanging engine; a server is only disconnected, and serves again once it answers."""
    hang_up = getattr(engine, "hang_up", engine.shutdown)
    hang_up()


AsyncVLLM.start_several = EngineReplicas.from_pretrained
