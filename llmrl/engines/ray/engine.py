"""`RayEngine`: an engine in a Ray actor on any machine of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Never

from llmrl._utils.imports import require
from llmrl.engines.base import (
    Completion,
    Engine,
    EngineError,
    PauseMode,
    SamplingConfig,
    TransferInfo,
    check_request,
)
from llmrl.engines.load import METRICS, EngineLoad
from llmrl.engines.ray.actor import EngineActor, EngineDiedError, EngineFacts
from llmrl.engines.ray.cluster import connect
from llmrl.engines.scores import TokenScores
from llmrl.engines.token_stream import TokenStream

if TYPE_CHECKING:
    import torch
    from ray.actor import ActorHandle
    from transformers import PreTrainedTokenizerBase

MAX_IN_FLIGHT = 1 << 16
"""Maximum number of concurrent calls of an actor; Ray queues the rest."""
_LOAD_SECONDS = 5.0
"""Time limit for reading the load."""


@dataclass(frozen=True, slots=True)
class EngineNotice:
    """Picklable handle with which other processes reach an engine's actor."""

    actor: ActorHandle
    facts: EngineFacts


class RayEngine:
    """The driver's side of an engine in a Ray actor, with the methods of `AsyncVLLM` that the engine has.

    A request is one remote call. One pending call reports the death of the actor or its engine, so
    `is_alive` makes no call. Ray does not restart the actor; `EngineReplicas` replaces it.
    """

    def __init__(self, actor: ActorHandle, facts: EngineFacts, *, start_s: float) -> None:
        self.actor = actor
        self.start_s = start_s
        """Seconds from the call until the engine accepted requests."""
        self._facts = facts
        self.max_model_len = facts.max_model_len
        """Maximum number of tokens of prompt and completion together."""
        self.vocab_size = facts.vocab_size
        self.takes_grammars = facts.takes_grammars
        """Whether the engine follows `SamplingConfig.grammar`."""
        self.streams_tokens = facts.streams_tokens
        """Whether the engine reports the tokens of a request while it samples them."""
        self.host = facts.host
        """Name of the engine's machine."""
        self.model_dtype: torch.dtype = facts.model_dtype  # type: ignore[assignment]  # None without weight updates
        """dtype of the engine's weights."""
        self.quantization = facts.quantization
        """Quantisation of the engine's weights, or None."""
        self.untested_arguments = facts.untested_arguments
        """Names in `engine_args` that llmrl has not compared with a trainer."""
        self.num_workers = facts.num_workers
        self.weight_transfer_backend = facts.weight_transfer_backend
        """vLLM's weight-transfer backend, or None."""
        self._policy_version = 0
        self._in_flight: set[str] = set()
        self._id_prefix = uuid.uuid4().hex[:8]
        self._id_counter = itertools.count()
        self._is_owner = True
        self._is_dead = is_dead = threading.Event()
        actor.wait_until_dead.remote().future().add_done_callback(lambda _: is_dead.set())

    @classmethod
    def start(
        cls,
        make_engine: Callable[[], Engine],
        *,
        ray_options: Mapping[str, object] | None = None,
        ray_init_config: Mapping[str, object] | None = None,
    ) -> RayEngine:
        """Start an engine in a new actor.

        Args:
            make_engine: picklable function that makes the engine; called in the actor.
            ray_options: options of the actor, such as `num_gpus` or `resources`; by default one CPU core.
            ray_init_config: arguments of `ray.init`, if this process is not connected yet, such as `address`.

        Raises ImportError if Ray is not installed, ConnectionError if there is no cluster at the
        address, EngineError if the actor does not start, and the errors of `make_engine`.
        """
        ray = connect(ray_init_config)
        start = time.perf_counter()
        remote = ray.remote(EngineActor).options(
            **{"num_cpus": 1, **(ray_options or {}), "max_concurrency": MAX_IN_FLIGHT, "max_restarts": 0}
        )
        actor = remote.remote()
        try:
            facts = ray.get(actor.start.remote(make_engine))
        except Exception as error:
            with contextlib.suppress(Exception):
                ray.kill(actor)
            cause = _cause(error)
            if cause is not error:
                raise cause from error
            raise EngineError(f"The engine's actor did not start: {error}") from error
        return cls(actor, facts, start_s=time.perf_counter() - start)

    def notice(self) -> EngineNotice:
        """Return a handle with which other processes of the cluster reach the actor."""
        return EngineNotice(self.actor, self._facts)

    @classmethod
    def reach(cls, notice: EngineNotice) -> RayEngine:
        """Return an engine that another process started and owns, for requests only."""
        engine = cls(notice.actor, notice.facts, start_s=0.0)
        engine._is_owner = False
        return engine

    @property
    def policy_version(self) -> int:
        """Version of the weights that a new request would use."""
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        """Set the version from which updates are counted."""
        require("ray", extra="ray").get(self.actor.set_policy_version.remote(version))
        self._policy_version = version

    @property
    def is_alive(self) -> bool:
        """Whether the engine can serve requests, as last reported."""
        return not self._is_dead.is_set()

    @property
    def num_in_flight(self) -> int:
        """Number of requests in flight."""
        return len(self._in_flight)

    def check_sampling(self, sampling: SamplingConfig) -> None:
        """Raise ValueError for a grammar that the engine cannot follow; `generate` checks other parameters."""
        if sampling.grammar is not None:
            with self._raising_as_the_engine():
                require("ray", extra="ray").get(self.actor.check_supported.remote(sampling))

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer."""
        return self._call("get_tokenizer")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Sample one completion as `AsyncVLLM.generate` does. Also raises EngineError if the actor died."""
        if request_id is None:
            request_id = str(next(self._id_counter))
        check_request(request_id, prompt_ids, self._in_flight)
        request = (list(prompt_ids), sampling, self._id_there(request_id))
        with self._in_flight_as(request_id):
            try:
                if stream is None:
                    return await self.actor.generate.remote(*request)
                return await self._stream(request, stream)
            except asyncio.CancelledError:
                self.actor.abort.remote(self._id_there(request_id))
                raise

    async def _stream(self, request: tuple[list[int], SamplingConfig, str], stream: TokenStream) -> Completion:
        token_ids: list[int] = []
        is_aborted = False
        async for part in self.actor.stream.remote(*request):
            news = await part
            if isinstance(news, Completion):
                return news
            token_ids = token_ids + news  # a new list, because readers may hold the previous one
            stream.report(token_ids)
            if stream.is_stopped and not is_aborted:
                is_aborted = True
                self.actor.abort.remote(request[-1])
        raise EngineError("The engine's actor ended a stream without its completion.")

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return the engine's token scores. Raises TypeError if it cannot score, and EngineError if it died."""
        if not self._facts.scores_tokens:
            raise TypeError("the engine in the actor does not score given tokens; it has no method score.")
        with self._in_flight_as(f"score-{next(self._id_counter)}"):
            scores = self.actor.score.remote(list(token_ids), top_k)
            try:
                return await scores
            except asyncio.CancelledError:
                require("ray", extra="ray").cancel(scores)
                raise

    @contextlib.contextmanager
    def _in_flight_as(self, request_id: str) -> Iterator[None]:
        """Count a request while it runs, and raise errors as the engine would."""
        self._require_alive()
        self._in_flight.add(request_id)
        try:
            with self._raising_as_the_engine():
                yield
        finally:
            self._in_flight.discard(request_id)

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far. Unknown ids are ignored."""
        if self.is_alive and request_id in self._in_flight:
            with self._raising_as_the_engine():
                await self.actor.abort.remote(self._id_there(request_id))

    def _id_there(self, request_id: str) -> str:
        # The prefix makes ids unique: several clients use one actor, and requests of a killed client may remain.
        return f"{self._id_prefix}/{request_id}"

    async def progress(self) -> int | None:
        """Return what `AsyncVLLM.progress` returns. Raises EngineError if the actor died."""
        with self._raising_as_the_engine():
            return await self.actor.progress.remote()

    def take_load(self, reader: str = METRICS) -> EngineLoad | None:
        """Return what `AsyncVLLM.take_load` returns; None if the load is unknown or the actor does not answer."""
        ray = require("ray", extra="ray")
        try:
            return ray.get(self.actor.take_load.remote(reader), timeout=_LOAD_SECONDS)
        except ray.exceptions.RayError:
            return None

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = True) -> None:
        """Call `AsyncVLLM.pause`."""
        self._call("pause", mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """Call `AsyncVLLM.resume`."""
        self._call("resume")

    def reset_prefix_cache(self, *, reset_running_requests: bool = True) -> bool:
        """Call `AsyncVLLM.reset_prefix_cache`."""
        return self._call("reset_prefix_cache", reset_running_requests=reset_running_requests)

    def init_weight_transfer_engine(self, init_info: TransferInfo) -> None:
        """Call `AsyncVLLM.init_weight_transfer_engine`."""
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Call `AsyncVLLM.start_weight_update`."""
        self._call("start_weight_update")

    def update_weights(self, update_info: TransferInfo | list[TransferInfo]) -> None:
        """Call `AsyncVLLM.update_weights`."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | int | None = None) -> int:
        """Call `AsyncVLLM.finish_weight_update`."""
        return self._call("finish_weight_update", weight_version)

    def shutdown(self) -> None:
        """End the engine and its actor, if this process owns them; requests in flight raise EngineError."""
        if not self._is_owner:
            self._is_dead.set()
            return
        ray = require("ray", extra="ray")
        if not ray.is_initialized():
            return
        if self.is_alive:
            with contextlib.suppress(Exception):
                ray.get(self.actor.call.remote("shutdown"), timeout=10)
        self._is_dead.set()
        ray.kill(self.actor)

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Never:
        raise TypeError(
            "A RayEngine watches its actor from one process and cannot be pickled; start it in the process that uses "
            "it, or send an EngineRegistry."
        )

    def _call(self, method: str, *arguments: object, **options: object) -> Any:
        self._require_alive()
        with self._raising_as_the_engine():
            called = self.actor.call.remote(method, *arguments, **options)
            result, self._policy_version = require("ray", extra="ray").get(called)
        return result

    def _require_alive(self) -> None:
        if not self.is_alive:
            raise EngineError("The engine's actor is dead; start a new one.")

    @contextlib.contextmanager
    def _raising_as_the_engine(self) -> Iterator[None]:
        """Raise the engine's own error instead of Ray's, and EngineError if the actor died."""
        try:
            yield
        except Exception as error:
            from ray.exceptions import RayError, RayTaskError

            cause = _cause(error)
            is_lost = isinstance(error, RayError) and not isinstance(error, RayTaskError)
            if is_lost or isinstance(cause, EngineDiedError):
                self._is_dead.set()
                cause = EngineError(f"The engine's actor died: {cause}")
            raise cause from error


def _cause(error: Exception) -> Exception:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
