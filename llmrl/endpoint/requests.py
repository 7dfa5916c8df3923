"""Requests and answers, independent of the API dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from llmrl.data import Message, ToolSchema
from llmrl.rendering.tool_calls import Json, ToolCall

ASIDE = ":aside"
"""Suffix of the model's name in requests that are not recorded, such as titles or summaries."""
REFERENCES = "references"
"""Entry of a message that stands for an earlier answer: ids of its items."""
FinishReason = Literal["stop", "length", "tool_calls"]


class RefusedRequest(Exception):
    """Raised if a request is refused, with a message, an HTTP status and an error code."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error"):
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """Form of an answer that a client asks for: JSON of a schema, or a call."""

    option: str
    """Name of the client's option."""
    schema: Mapping[str, Json] | None
    """JSON schema of the answer; None for a call."""
    function: str = ""
    """Name of the function to call; empty for any."""
    is_required: bool = False
    """Whether a form that the engine does not support is refused; otherwise the option is ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request for one answer or several."""

    messages: tuple[Message, ...]
    model: str
    tools: tuple[ToolSchema, ...] = ()
    max_tokens: int | None = None
    """Maximum length of an answer, in tokens, in addition to the run's own limit."""
    stop: tuple[str, ...] = ()
    num_answers: int = 1
    is_streamed: bool = False
    may_call: bool = True
    """Whether answers may have tool calls; if not (`tool_choice` none), calls are returned as text."""
    form: AnswerForm | None = None
    """Form of the answers; None samples them freely."""
    wants_log_probs: bool = False
    is_usage_streamed: bool = False
    previous_id: str | None = None
    """Id of the reply that these messages continue, if the client sends only new ones."""
    num_instructions: int = 0
    """Number of leading messages for this request only, if it continues an earlier one."""
    is_trained: bool = True
    """Whether the answer is recorded for training."""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    """Requested fields of `SamplingConfig`; ignored in training."""
    overridden: tuple[str, ...] = ()
    """Names of the requested options that are not supported and are ignored."""

    @property
    def known_id(self) -> str | None:
        """Id of an earlier reply, or of an item of one, that the request names."""
        if self.previous_id is not None:
            return self.previous_id
        return next((name for message in self.messages for name in message.get(REFERENCES, ())), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAnswer:
    """One answer to a request, as the client sees it."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    """Tool calls, each with an id."""
    finish_reason: FinishReason
    stop_string: str | None
    """Stop string that ended the answer and is not in its content, if any."""
    token_texts: Sequence[str]
    """Text of each sampled token; empty unless log-probs were requested."""
    log_probs: Sequence[float]
    num_tokens: int

    def message(self) -> Message:
        """Return the answer as a message of the client's next request."""
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
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache."""

    @property
    def num_completion_tokens(self) -> int:
        """Number of sampled tokens of all answers."""
        return sum(answer.num_tokens for answer in self.answers)
