"""Splitting a completion into reasoning and answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmrl.data import text_of


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What a model writes before and after its reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"

    def split(self, text: str, *, is_open: bool = False) -> tuple[str | None, str]:
        r"""Return the reasoning (None when there is none) and the rest of a completion's text.

        Args:
            text: as sampled.
            is_open: whether the prompt already opened the reasoning, so that the text starts inside it.

        Example:
            >>> marks = ThoughtMarks()
            >>> marks.split("<think>\n1+1\n</think>\n\n2"), marks.split("2"), marks.split("<think>1+")
            (('1+1', '2'), (None, '2'), ('1+', ''))
        """
        stripped = text.lstrip()
        if stripped.startswith(self.opening):
            text = stripped[len(self.opening) :]
        elif not is_open and not stripped.startswith(self.closing):
            return None, text
        reasoning, closing, rest = text.partition(self.closing)
        return reasoning.strip("\n"), rest.lstrip("\n") if closing else ""

    def is_open_at_end(self, prompt: str) -> bool:
        """Return whether a prompt ends with reasoning that it has opened."""
        return prompt.rstrip().endswith(self.opening)

    def without_empty(self, text: str) -> str:
        r"""Return a text without its empty reasoning blocks, of which some templates write the closing mark alone.

        Example:
            >>> ThoughtMarks().without_empty("a <think>\n\n</think>\n\nb </think>c <think>d</think>e")
            'a b c <think>d</think>e'
        """
        opening = re.escape(self.opening)
        closing = re.escape(self.closing)
        held = rf"{opening}(?:(?!{closing}).)*?(?!{closing})\S(?:(?!{closing}).)*?{closing}"
        return re.sub(rf"({held})|(?:{opening}\s*)?{closing}\s*", r"\1", text, flags=re.DOTALL)

    def without_empty_first(self, text: str) -> str:
        """Return a text without the empty reasoning block with which it begins."""
        opening = re.escape(self.opening)
        closing = re.escape(self.closing)
        return re.sub(rf"\A\s*(?:{opening}\s*)?{closing}\s*", "", text)


def said_after(lead: str, text: str, thoughts: ThoughtMarks | None) -> str | None:
    r"""Return what was said after a prompt's end `lead`, where the template writes the answer's turn as `text`.

    An empty reasoning block says nothing, whether the prompt has it, or the answer, and however it is spelled:
    templates that ask without reasoning drop it later. None where the template writes something else than the prompt.

    Example:
        >>> thoughts = ThoughtMarks()
        >>> said_after("<think>\n\n</think>\n\n", "four", thoughts), said_after("<think>", "four", thoughts)
        ('four', '</think>four')
    """
    if text.startswith(lead):
        return text[len(lead) :]
    if thoughts is None:
        return None
    bare = thoughts.without_empty_first(text)
    is_opened_before = not lead.strip() and text.lstrip().startswith(thoughts.closing)
    if lead.strip() == thoughts.opening or is_opened_before:
        return thoughts.closing + bare
    is_closed = thoughts.closing in lead and not thoughts.without_empty_first(lead).strip()
    return bare if is_closed else None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What stands around an answer and around reasoning, and how a message hands its reasoning to the template."""

    thoughts: ThoughtMarks | None
    """None where the template knows no reasoning."""
    field: str
    """The template's own name of `reasoning_content`; with a `.` in front that of a part of the content."""
    opening: str
    """What is sampled before an answer."""
    closing: str
    """What is sampled between an answer and the end of its turn."""

    def written(self, message: Mapping[str, object]) -> dict[str, object]:
        """Return a message with its reasoning where the template reads it."""
        written = dict(message)
        reasoning = written.get("reasoning_content")
        content = text_of(written.get("content"))
        if written["role"] != "assistant" or self.field == "reasoning_content":
            return written
        if self.field == ".thoughts":  # such a template takes one answer as text only where it takes all so
            thoughts = [{"type": "thoughts", "text": reasoning}] if reasoning else []
            answer = [{"type": "response", "text": content}] if content else []
            written["content"] = {"blocks": [*thoughts, *answer]}
        elif self.field == ".thinking" and reasoning:
            answer = [{"type": "text", "text": content}] if content else []
            written["content"] = [{"type": "thinking", "thinking": reasoning}, *answer]
        elif reasoning:
            written[self.field] = reasoning
        written.pop("reasoning_content", None)
        return written

    def said(self, text: str) -> str:
        """Return the answer in a text that was sampled, without what stands around it.

        Example:
            >>> AnswerFormat(None, "", "<|START_RESPONSE|>", "<|END_RESPONSE|>").said("<|START_RESPONSE|>four")
            'four'
        """
        opening = self.opening.strip()
        closing = self.closing.strip()
        if opening.endswith((">", "]")) and text.lstrip().startswith(opening):  # a tag, whatever white space is there
            text = text.lstrip().removeprefix(opening)
        else:
            text = text.removeprefix(self.opening)
        if closing.endswith((">", "]")) and text.rstrip().endswith(closing):
            return text.rstrip().removesuffix(closing)
        return text.removesuffix(self.closing)


NO_MARKS = AnswerFormat(None, "reasoning_content", "", "")
"""Of a template before it is asked."""
