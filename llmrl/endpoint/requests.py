"""Requests of clients and their answers, independent of the dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmrl.data import Message, ToolSchema
from llmrl.rendering.tool_calls import Json, ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


class RefusedRequest(Exception):
    """A request that is refused; each dialect has its own form of the error.

    Args:
        message: text of the error, for persons.
        status: HTTP status.
        code: code of the error, for programs.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request for answers."""

    messages: tuple[Message, ...]
    model: str
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    """Maximum length of an answer, in tokens; the run's own limit applies, too."""
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    is_streamed: bool = False
    may_call: bool = True
    """False if calls must be read as text (`tool_choice` none)."""
    wants_log_probs: bool = False
    is_usage_streamed: bool = False
    previous_id: str | None = None
    """Id of the reply that these messages continue, if a client sends only the new ones."""
    num_instructions: int = 0
    """Number of messages at the beginning that apply to this request only, if it continues an earlier one."""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    """Entries of a `SamplingConfig` that it sets; a run that trains overrides them."""
    overridden: tuple[str, ...] = ()
    """Names of the requested options that are not supported; the answer is sampled without them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One answer to a request, as its client sees it."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    """Each with an id."""
    finish_reason: FinishReason
    stop_string: str | None
    """The stop string that ended it, which is not in its content."""
    token_texts: Sequence[str]
    """The log-probs of each sampled token, if requested."""
    log_probs: Sequence[float]
    num_tokens: int

    def message(self) -> Message:
        """Return the answer as the client will send it again."""
        message: dict[str, Json] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReply:
    """All answers to a request."""

    reply_id: str
    model: str
    created_s: int
    """Seconds since 1970."""
    answers: tuple[ModelAnswer, ...]
    num_prompt_tokens: int
    num_cached_tokens: int = field(default=0)
    """Number of the prompt's tokens that an earlier turn of the session held."""

    @property
    def num_completion_tokens(self) -> int:
        """Of all answers."""
        return sum(answer.num_tokens for answer in self.answers)
