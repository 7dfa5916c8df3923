"""Separation of reasoning and answer in a completion."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmrl.data import text_of
from llmrl.rendering.results import text_parts

NUM_END_TOKENS = 32
"""Number of last tokens that bridges and parsers read: an end-of-turn token with the white space after it, or the end
of a prompt, which may open reasoning."""


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """Text that a model writes before and after its reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"

    def split(self, text: str, *, is_open: bool = False) -> tuple[str | None, str]:
        r"""Return a completion's reasoning, or None, and the rest; `is_open` means that the prompt opened reasoning.

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
        """Return whether a prompt ends with the opening mark of reasoning."""
        return prompt.rstrip().endswith(self.opening)

    def without_empty(self, text: str) -> str:
        r"""Return a text without empty reasoning blocks, including those that only have the closing mark.

        Example:
            >>> ThoughtMarks().without_empty("a <think>\n\n</think>\n\nb </think>c <think>d</think>e")
            'a b c <think>d</think>e'
        """
        opening = re.escape(self.opening)
        closing = re.escape(self.closing)
        held = rf"{opening}(?:(?!{closing}).)*?(?!{closing})\S(?:(?!{closing}).)*?{closing}"
        return re.sub(rf"({held})|(?:{opening}\s*)?{closing}\s*", r"\1", text, flags=re.DOTALL)

    def without_empty_first(self, text: str) -> str:
        """Return a text without an empty reasoning block at its start."""
        opening = re.escape(self.opening)
        closing = re.escape(self.closing)
        return re.sub(rf"\A\s*(?:{opening}\s*)?{closing}\s*", "", text)


def said_after(lead: str, text: str, thoughts: ThoughtMarks | None) -> str | None:
    r"""Return the text sampled after a prompt's end `lead`, given the template's `text` of the answer's turn.

    Empty reasoning blocks are ignored in both. Return None if the template's text does not continue the prompt.

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
    if thoughts.closing in lead and not thoughts.without_empty_first(lead).strip():
        return bare
    return None


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Text around answers and reasoning, and the message field for reasoning."""

    thoughts: ThoughtMarks | None
    """None if the template has no reasoning."""
    field: str
    """Template's name for `reasoning_content`; a name with a leading `.` is a part of the content."""
    opening: str
    """Sampled text before an answer."""
    closing: str
    """Sampled text between an answer and the end of its turn."""

    def written(self, message: Mapping[str, object]) -> dict[str, object]:
        """Return a message with its reasoning in the field that the template reads."""
        written = dict(message)
        if written["role"] != "assistant" or self.field == "reasoning_content":
            return written
        reasoning = written.pop("reasoning_content", None)
        content = text_of(written.get("content"))
        if self.field == ".thoughts":  # this template requires all answers in the same form
            blocks = [*text_parts(reasoning, kind="thoughts"), *text_parts(content, kind="response")]
            written["content"] = {"blocks": blocks}
        elif self.field == ".thinking" and reasoning:
            written["content"] = [{"type": "thinking", "thinking": reasoning}, *text_parts(content)]
        elif reasoning:
            written[self.field] = reasoning
        return written

    def said(self, text: str) -> str:
        """Return the answer in a sampled text, without the text around it.

        Example:
            >>> AnswerFormat(None, "", "<|START_RESPONSE|>", "<|END_RESPONSE|>").said("<|START_RESPONSE|>four")
            'four'
        """
        opening = self.opening.strip()
        closing = self.closing.strip()
        if opening.endswith((">", "]")) and text.lstrip().startswith(opening):  # white space around a tag may vary
            text = text.lstrip().removeprefix(opening)
        else:
            text = text.removeprefix(self.opening)
        if closing.endswith((">", "]")) and text.rstrip().endswith(closing):
            return text.rstrip().removesuffix(closing)
        return text.removesuffix(self.closing)


NO_MARKS = AnswerFormat(None, "reasoning_content", "", "")
"""Format before the template is probed."""
