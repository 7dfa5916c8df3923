"""The part of `EngineReplicas` that sends and retries requests."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from llmrl.engines.base import Completion, Engine, EngineError, SamplingConfig
from llmrl.engines.hang_detector import HangDetector
from llmrl.engines.pending import PendingRequest, Waiters
from llmrl.engines.router import NoReplicaError, Router
from llmrl.engines.scores import ScoresTokens, TokenScores

EngineT = TypeVar("EngineT", bound=Engine)
T = TypeVar("T")
LOOK_AGAIN_S = 0.1
"""Seconds between checks of the replicas while some do not serve."""


class ReplicaRequests(Generic[EngineT]):
    """Requests to replicas, which are retried on failure."""

    num_retried: int
    is_shut_down: bool
    _engines: list[EngineT]
    _router: Router
    _num_retries: int
    _restarts_in_a_row: list[int]
    _dead: set[int]
    _unproven: set[int]
    _recovering: dict[int, threading.Thread]
    _version: int
    _are_all_open: bool
    _looked_s: float
    _pending: dict[str, PendingRequest]
    _waiters: Waiters
    _ids: itertools.count[int]
    _lock: threading.RLock
    _watch: HangDetector | None
    _watching: asyncio.Task[None] | None

    def refresh(self) -> None:
        """Check every replica."""
        raise NotImplementedError

    async def watch_for_hangs(self, is_needed: Callable[[], bool] = lambda: True) -> None:
        """Replace engines that hang."""
        raise NotImplementedError

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """Sample one completion on one of the replicas; waits while all are being restarted.

        Raises ValueError as the replica's own `generate`, and EngineError if it failed `num_retries` + 1 times, or no
        replica serves or is being restarted.
        """

        def ask(engine: Engine, attempt_id: str) -> Awaitable[Completion]:
            return engine.generate(prompt_ids, sampling, request_id=attempt_id, routing_key=routing_key)

        completion = await self._served(ask, request_id, routing_key)
        return Completion([], [], [], "abort") if completion is None else completion

    async def score(self, token_ids: Sequence[int], *, top_k: int = 0) -> TokenScores:
        """Return the scores of `[num_tokens]` tokens by one of the replicas; waits while all are being restarted.

        Raises TypeError if the engines do not score tokens, ValueError as the replica's own `score`, and EngineError as
        `generate`.
        """

        def ask(engine: Engine, attempt_id: str) -> Awaitable[TokenScores]:
            if not isinstance(engine, ScoresTokens):
                raise TypeError(f"{type(engine).__name__} does not score given tokens; it has no method score.")
            return engine.score(token_ids, top_k=top_k)

        scores = await self._served(ask, None, None)
        assert scores is not None  # its id is generated here, so it cannot be aborted
        return scores

    async def _served(
        self, ask: Callable[[Engine, str], Awaitable[T]], request_id: str | None, routing_key: str | None
    ) -> T | None:
        """Return a replica's answer; None if the request was aborted before it was assigned."""
        if request_id is None:
            request_id = f"replicas-{id(self):x}-{next(self._ids)}"
        elif request_id in self._pending:
            raise ValueError(f"request_id {request_id!r} is in flight already; ids must be unique.")
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
                        self._router.release(pending.attempt_id)
        finally:
            del self._pending[request_id]
        return None

    async def abort(self, request_id: str) -> None:
        """Abort a request; its `generate` returns the tokens so far, none while it waits for a retry."""
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
            if not self._are_all_open and time.monotonic() - self._looked_s > LOOK_AGAIN_S:
                self.refresh()
            with self._lock:
                try:
                    index = self._router.assign(pending.attempt_id, routing_key, avoid=avoid)
                except NoReplicaError as error:
                    if self.is_shut_down or not self._recovering:
                        raise EngineError(self._why_none()) from error
                    waiter = self._waiters.add()
                else:
                    engine = self._engines[index]
                    if engine.is_alive and engine.policy_version == self._version:
                        pending.engine = engine
                        return index, engine
                    self._router.release(pending.attempt_id)
                    self.refresh()
                    continue
            await waiter
        return None

    def _why_none(self) -> str:
        if len(self._dead) == len(self._engines) or self.is_shut_down:
            return f"None of the {len(self._engines)} engines is running; start new ones."
        return (
            f"None of the {len(self._engines)} engines may serve: {len(self._dead)} are dead, "
            f"{len(self._unproven)} without weights of version {self._version}; send the weights again."
        )
