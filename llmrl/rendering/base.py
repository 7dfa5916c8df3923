"""Protocol of renderers, which convert messages to token ids and completions to messages, and what they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from llmrl._utils.types import Tokenizer
from llmrl.data import MalformedToolCall, Message, ParsedCompletion, ToolSchema
from llmrl.rendering.reasoning import ThoughtMarks


@runtime_checkable
class Renderer(Protocol):
    """Translates between messages and token ids for one model."""

    is_history_rewritten: bool
    """Whether the template changes earlier turns when later ones follow, for example by dropping reasoning."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant's turn."""
    thought_marks: ThoughtMarks | None
    """Marks around reasoning, if known and if empty reasoning has no meaning; otherwise None."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of the whole conversation, `[num_tokens]`; raise RenderingError if it is refused."""

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Return whether later turns may change the rendering of an earlier turn in this conversation."""

    def check_tools(self) -> None:
        """Raise RenderingError, with a remedy, if conversations with tools cannot be rendered."""

    def bridge(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return the ids to append after `token_ids`, which end with a sampled completion, to prompt the next one.

        These ids are the end of the turn if it is missing, the new messages and the generation prompt. Only the last
        tokens of `token_ids` are read. Tool results need the `name` of their function
        (`llmrl.rendering.results.name_results`) if the template writes it; results without name and id answer no call.
        Raises RenderingError if the template refuses the messages or a required name is missing.
        """

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedCompletion:
        """Return sampled tokens as an assistant message; never raise. `prompt_ids` may end within reasoning."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of templated text; special tokens are recognised, none is added."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""


class TextCoder:
    """Encoding and decoding of templated text with a tokenizer."""

    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of templated text; special tokens are recognised, none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def completion_of(
    content: str,
    *,
    is_complete: bool,
    reasoning: str | None = None,
    tool_calls: Sequence[Message] = (),
    malformed: Sequence[MalformedToolCall] = (),
) -> ParsedCompletion:
    """Return a parsed completion; its message only has the entries that are given."""
    message: dict[str, object] = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
    return ParsedCompletion(message, is_complete, tuple(malformed))


def end_of_turn(renderer: Renderer, token_ids: Sequence[int]) -> int | None:
    """Return the number of tokens up to the first end-of-turn token, this one included; None if there is none."""
    return next((place + 1 for place, token in enumerate(token_ids) if token in renderer.stop_token_ids), None)


@dataclass(frozen=True, slots=True)
class Ending:
    """End of an assistant's turn in a template, for a given role of the next message."""

    token_id: int
    """End-of-turn token; if turns have none (GLM), the sampled token that opens the next role's turn."""
    offset: int
    """Number of characters between the assistant's content and the end-of-turn token."""
    lead_ids: tuple[int, ...]
    """Tokens that the template writes between an answer and the end-of-turn token; usually none."""
