"""What a renderer is: messages to token ids, whole or as a delta, and completions back to messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from llmrl.data import Message, ParsedCompletion, ToolSchema
from llmrl.rendering.reasoning import ThoughtMarks


@runtime_checkable
class Renderer(Protocol):
    """Translates between messages and token ids for one model."""

    is_history_rewritten: bool
    """Whether the template renders a turn differently once others follow (it drops earlier reasoning, say)."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant's turn."""
    thought_marks: ThoughtMarks | None
    """What stands around reasoning, where empty reasoning says nothing; None where that is not known."""

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Return the token ids of the whole conversation, `[num_tokens]`.

        Raises RenderingError if the template refuses the messages.
        """
        ...

    def may_rewrite(self, messages: Sequence[Message], *, tools: Sequence[ToolSchema] | None = None) -> bool:
        """Return whether some turn of this conversation may be rendered differently once others follow."""
        ...

    def check_tools(self) -> None:
        """Say before anything is sampled whether conversations with tools can be rendered.

        Raises RenderingError if they cannot, and what to do about it.
        """
        ...

    def bridge(
        self,
        token_ids: Sequence[int],
        new_messages: Sequence[Message],
        *,
        tools: Sequence[ToolSchema] | None = None,
    ) -> list[int]:
        """Return what to append after `token_ids`, which end with a completion as sampled, to ask for the next one.

        Ends the turn where the completion did not, then the new messages and the generation prompt. Only the tail
        of `token_ids` is looked at, so the cost is that of the new messages. Tool results have the `name` of their
        function (`llmrl.rendering.results.name_results`), which some templates write; one without name and id answers
        no call.

        Raises RenderingError if the template refuses the messages, or writes a name that is missing.
        """
        ...

    def parse(
        self,
        completion_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> ParsedCompletion:
        """Read sampled tokens as an assistant message; never raises.

        `prompt_ids` are what they were sampled after, or the end of that: some prompts open the reasoning.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of templated text; special tokens are recognised, none is added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How a template ends an assistant's turn when a message of some role follows."""

    token_id: int
    """The end-of-turn token; where turns have none, what opens the next role's (GLM), which the model writes too."""
    offset: int
    """Characters between the mark in the assistant's message and the end-of-turn token."""
    lead_ids: tuple[int, ...]
    """Tokens that the template puts between an answer and the end-of-turn token; most have none."""
