"""The Ray actor of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmrl.engines.base import (
    Completion,
    Engine,
    EngineError,
    ReportsProgress,
    SamplingConfig,
    TakesGrammars,
    UpdatableEngine,
    check_supported,
)
from llmrl.engines.load import EngineLoad, take_load
from llmrl.engines.scores import ScoresTokens, TokenScores
from llmrl.engines.token_stream import TokenStream, is_streaming

if TYPE_CHECKING:
    import torch


class EngineDiedError(EngineError):
    """Raised if the engine in the actor is dead although the actor lives."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Constants of an engine; the defaults are those of an engine that takes no weights."""

    max_model_len: int
    vocab_size: int | None
    host: str
    scores_tokens: bool
    takes_grammars: bool
    streams_tokens: bool
    model_dtype: torch.dtype | None = None
    quantization: str | None = None
    num_workers: int = 0
    weight_transfer_backend: str | None = None
    untested_arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> EngineFacts:
        """Describe an engine of this process."""
        scores_tokens = isinstance(engine, ScoresTokens)
        takes_grammars = isinstance(engine, TakesGrammars) and engine.takes_grammars
        streams_tokens = is_streaming(engine)
        host = socket.gethostname()
        here = cls(engine.max_model_len, engine.vocab_size, host, scores_tokens, takes_grammars, streams_tokens)
        if not isinstance(engine, UpdatableEngine):
            return here
        names = ("model_dtype", "quantization", "num_workers", "weight_transfer_backend")
        facts = {name: getattr(engine, name) for name in names}
        return replace(here, **facts, untested_arguments=getattr(engine, "untested_arguments", ()))


class EngineActor:
    """Ray actor that contains an engine and watches it."""

    async def start(self, make_engine: Callable[[], Engine]) -> EngineFacts:
        """Start the engine and return its constants; Ray reports the errors of a constructor as text only."""
        self._engine = await asyncio.to_thread(make_engine)
        return EngineFacts.of(self._engine)

    async def generate(self, prompt_ids: list[int], sampling: SamplingConfig, request_id: str) -> Completion:
        """Call `Engine.generate`."""
        with self._told_if_dead():
            return await self._engine.generate(prompt_ids, sampling, request_id=request_id)

    async def stream(
        self, prompt_ids: list[int], sampling: SamplingConfig, request_id: str
    ) -> AsyncIterator[list[int] | Completion]:
        """Yield the new token ids while `Engine.generate` samples them, and then the completion."""
        news = asyncio.Event()
        stream = TokenStream(news.set)
        with self._told_if_dead():
            streamed: dict[str, Any] = {"stream": stream}  # engines that do not stream have no such argument
            request = self._engine.generate(prompt_ids, sampling, request_id=request_id, **streamed)
            task = asyncio.ensure_future(request)
            task.add_done_callback(lambda _: news.set())
            num_sent = 0
            try:
                while not task.done():
                    await news.wait()
                    news.clear()
                    sampled = stream.token_ids  # a later report is another list
                    if len(sampled) > num_sent:
                        yield sampled[num_sent:]
                        num_sent = len(sampled)
                yield await task
            finally:
                task.cancel()

    async def score(self, token_ids: list[int], top_k: int) -> TokenScores:
        """Call `ScoresTokens.score`, which the engine must have."""
        assert isinstance(self._engine, ScoresTokens)
        with self._told_if_dead():
            return await self._engine.score(token_ids, top_k=top_k)

    @contextlib.contextmanager
    def _told_if_dead(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            if self._engine.is_alive:
                raise
            raise EngineDiedError(str(error)) from error

    async def abort(self, request_id: str) -> None:
        """Call `Engine.abort`."""
        await self._engine.abort(request_id)

    async def progress(self) -> int | None:
        """Return the engine's progress, or None if it does not report any."""
        return await self._engine.progress() if isinstance(self._engine, ReportsProgress) else None

    async def check_supported(self, sampling: SamplingConfig) -> None:
        """Raise ValueError if the engine does not support these parameters."""
        await asyncio.to_thread(check_supported, self._engine, sampling)

    async def take_load(self, reader: str) -> EngineLoad | None:
        """Return the engine's load, or None if it does not report any."""
        return take_load(self._engine, reader)

    async def call(self, method: str, *arguments: object, **options: object) -> tuple[object, int]:
        """Call a blocking method of the engine; return its result and the engine's policy version afterwards."""
        result = await asyncio.to_thread(getattr(self._engine, method), *arguments, **options)
        return result, self._engine.policy_version

    async def set_policy_version(self, version: int) -> None:
        """Set the version from which updates are counted."""
        self._engine.policy_version = version

    async def wait_until_dead(self) -> None:
        """Return when the engine can no longer serve."""
        while self._engine.is_alive:
            await asyncio.sleep(0.1)
