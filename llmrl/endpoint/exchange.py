"""`Exchange`: a request of a session and its answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from llmrl.endpoint.requests import ModelReply, ModelRequest
from llmrl.endpoint.tree import ChainKey
from llmrl.engines import Completion
from llmrl.rendering import Conversation

RETRY_SECONDS = 10.0
"""Time for which sampling continues after the client disconnects; clients retry within 8 s."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The completions of a request, and its prompt."""

    prompted: Conversation
    prompt_key: ChainKey
    completions: list[Completion]


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its answers; repeated requests share them."""

    request: ModelRequest
    task: asyncio.Task[Sampled]
    """Task that samples; raises RefusedRequest if the request cannot be answered."""
    num_clients: int = 1
    """Number of waiting clients."""
    reply: ModelReply | None = None
    """The delivered reply, or None."""
    num_troubles: int = 0
    """Number of failures and refusals in the session before this request."""

    @property
    def is_abandoned(self) -> bool:
        """Whether all clients disconnected before the reply."""
        return self.reply is None and not self.num_clients

    @property
    def is_lost(self) -> bool:
        """Whether the task failed or was cancelled."""
        return self.task.done() and (self.task.cancelled() or self.has_failed)

    @property
    def has_failed(self) -> bool:
        """Whether the task failed."""
        return self.task.done() and not self.task.cancelled() and self.task.exception() is not None

    def leave(self) -> None:
        """Record that a client disconnected; sampling ends unless the client repeats the request in time."""
        self.num_clients -= 1
        if self.is_abandoned and not self.task.done():
            asyncio.get_running_loop().call_later(RETRY_SECONDS, lambda: self.is_abandoned and self.task.cancel())
