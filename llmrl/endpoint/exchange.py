"""`Exchange`: a request of a session and its answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmrl.endpoint.requests import ModelReply, ModelRequest
from llmrl.endpoint.tree import ChainKey
from llmrl.engines import Completion
from llmrl.engines.token_stream import TokenStream
from llmrl.rendering import Conversation
from llmrl.rendering.answer_text import AnswerText

RETRY_SECONDS = 10.0
"""Time for which sampling continues after the client disconnects; clients retry within 8 s."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The completions of a request, and its prompt."""

    prompted: Conversation
    prompt_key: ChainKey
    completions: list[Completion]


class Exchange:
    """A request and its answers; repeated requests share them.

    Args:
        request: the request.
        num_troubles: number of failures and refusals in the session before this request.
    """

    def __init__(self, request: ModelRequest, *, num_troubles: int = 0) -> None:
        self.request = request
        self.num_troubles = num_troubles
        self.task: asyncio.Task[Sampled]
        """Task that samples; raises RefusedRequest if the request cannot be answered."""
        self.num_clients = 1
        """Number of waiting clients."""
        self.reply: ModelReply | None = None
        """The delivered reply, or None."""
        self.head = ModelReply(
            reply_id=uuid.uuid4().hex[:24], model=request.model, created_s=int(time.time()), answers=()
        )
        """The reply without its answers."""
        self.streams: list[TokenStream] = []
        """Token streams of the answers, if clients read them while they are sampled."""
        self.texts: list[AnswerText] = []
        """Text of each of these answers that was sent to clients."""
        self.is_stopped = False
        """Whether the last client disconnected after it had read a part of an answer."""
        self._news = asyncio.Event()

    def begin(self, task: asyncio.Task[Sampled]) -> None:
        """Set the task that samples."""
        self.task = task
        task.add_done_callback(lambda task: self._news.set())

    def open_streams(self, texts: Sequence[AnswerText], num_prompt_tokens: int) -> list[TokenStream]:
        """Return a token stream for each answer; `texts` decode their tokens."""
        self.head = replace(self.head, num_prompt_tokens=num_prompt_tokens)
        self.texts = list(texts)
        self.streams = [TokenStream(self._news.set) for _ in texts]
        return self.streams

    async def wait(self, seconds: float) -> bool:
        """Wait for more text or the end of the answers; return False if neither comes in time."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline := loop.time() + seconds, self._news.set)  # cheaper than `asyncio.timeout`
        try:
            await self._news.wait()
        finally:
            timer.cancel()
        self._news.clear()
        return loop.time() < deadline

    def read(self) -> list[tuple[str, str]]:
        """Return the reasoning and the content of each answer so far."""
        for stream, text in zip(self.streams, self.texts, strict=True):
            text.update(stream.token_ids)
        return [(text.reasoning, text.content) for text in self.texts]

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients disconnected before the reply."""
        return self.reply is None and not self.num_clients

    @property
    def is_begun(self) -> bool:
        """Whether clients have received a part of an answer, but not the reply."""
        return self.reply is None and any(text.num_characters for text in self.texts)

    @property
    def is_lost(self) -> bool:
        """Whether the task failed or was cancelled, or the answers were stopped."""
        return self.is_stopped or self.task.cancelled() or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the task failed."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is not None

    def stop(self) -> None:
        """Let the engine end the answers; the tokens sampled so far are kept."""
        self.is_stopped = True
        for stream in self.streams:
            stream.is_stopped = True

    def leave(self) -> None:
        """Record that a client disconnected.

        If no client is left, answers that were read in part are stopped; other answers are
        cancelled unless the request is repeated in time.
        """
        self.num_clients -= 1
        if not self.is_abandoned:
            return
        if self.is_begun:
            self.stop()
        elif not self.task.done():
            asyncio.get_running_loop().call_later(RETRY_SECONDS, lambda: self.is_abandoned and self.task.cancel())
