"""Detection of the text around answers and reasoning in a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from llmrl._utils.types import Tokenizer
from llmrl.data import Message
from llmrl.data.content_marks import RenderingError
from llmrl.rendering.base import Ending
from llmrl.rendering.probing import ANSWER, NEXT_USER, PLAIN_ANSWER, REASONING, TemplateProbe, calling
from llmrl.rendering.reasoning import AnswerFormat, ThoughtMarks
from llmrl.rendering.writer import TemplateWriter

_USER: Message = {"role": "user", "content": "Xq7UserMarkXq7"}

# Names of a message's reasoning field, the most common first; with a leading `.`, of a content part and its field.
_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "thoughts", ".thinking", ".thoughts")
# Number of characters before reasoning that are searched for its mark.
_NUM_SEARCHED = 100
_THINKING_VARIABLE = re.compile(r"\b(?:enable_thinking|thinking_mode)\b")


def find_answer_format(writer: TemplateWriter, ending: Ending, reasoning_parser: str) -> AnswerFormat:
    """Return the format of answers and reasoning in a template.

    `ending` is the ending of a plain answer; `reasoning_parser` is as in `TemplateRenderer`. Raises
    RenderingError if the template supports reasoning but its marks are not found.
    """
    field = "reasoning_content"
    thoughts = None
    if reasoning_parser == "auto":
        field, thoughts = _find_thoughts(writer)
    elif reasoning_parser == "think":
        field = next(_fields(writer), (field, "", ""))[0]
        thoughts = ThoughtMarks()
    opening, closing = _find_answer(_with_field(writer, field), ending, thoughts)
    return AnswerFormat(thoughts, field, opening, closing)


def _with_field(writer: TemplateWriter, field: str) -> TemplateProbe:
    """Return a probe that passes reasoning to the template in `field`."""
    return TemplateProbe(replace(writer, answer_format=AnswerFormat(None, field, "", "")))


def _fields(writer: TemplateWriter) -> Iterator[tuple[str, str, str]]:
    """Yield each reasoning field that the template writes, with the text before and after it."""
    for name in _FIELDS:
        if not re.search(rf"\b{name.removeprefix('.')}\b", writer.chat_template):
            continue
        probe = _with_field(writer, name)
        for answer in (PLAIN_ANSWER, calling()):
            text = probe.text([_USER, {**answer, "reasoning_content": REASONING}], is_prompt=False) or ""
            before, found, after = text.partition(REASONING)
            if found and ANSWER in after:
                yield name, before, after


def _find_thoughts(writer: TemplateWriter) -> tuple[str, ThoughtMarks | None]:
    """Return the message field for reasoning and the marks around reasoning, None if the template has no reasoning."""
    usual = ThoughtMarks()
    tag = _tag_pattern(writer.tokenizer)
    probe = TemplateProbe(writer)
    plain, _ = _around_answer(probe)
    is_written = False
    for field, before, after in _fields(writer):
        is_written = True
        opened = re.search(rf"({tag}[^\s<>\[\]|]*)\s*$", before[-_NUM_SEARCHED:])
        closed = re.match(rf"\s*({tag})", after)
        if opened is None or closed is None:
            continue
        marks = ThoughtMarks(opened[1], closed[1])
        # A mark that also precedes answers without reasoning belongs to the turn.
        if marks.opening not in marks.without_empty(plain):
            return field, marks
    if usual.closing in writer.chat_template:
        return "reasoning_content", usual
    code = re.sub(r"\{#.*?#\}", "", writer.chat_template, flags=re.DOTALL)
    if is_written or _THINKING_VARIABLE.search(code):
        dropped = _find_dropped(probe)
        if dropped is not None:
            return "reasoning_content", dropped
        raise RenderingError(
            "The chat template has a variable or a field for reasoning, but the text that it writes around reasoning "
            "is not found, so reasoning would be taken for the answer. Use backend='renderers' if that package "
            "supports the model, or pass reasoning_parser='none' if the model does not reason, or 'think' if it "
            "writes <think> and </think>."
        )
    return "reasoning_content", None


def _find_dropped(probe: TemplateProbe) -> ThoughtMarks | None:
    """Return the marks around text that the template drops from earlier answers; None if there are none."""
    found = dict.fromkeys(re.findall(r"<\|?[a-z_:]+\|?>|\[/?[A-Z_]+\]", probe.writer.chat_template))
    for opening in found:
        twins = (opening.replace("<|", "<").replace(">", "|>"), opening.replace("<", "</"), opening.replace("[", "[/"))
        for closing in twins:
            if closing == opening or closing not in found:
                continue
            answer = {"role": "assistant", "content": f"{opening}{REASONING}{closing}{ANSWER}"}
            text = probe.text([_USER, answer, NEXT_USER])
            if text is not None and ANSWER in text and REASONING not in text:
                return ThoughtMarks(opening, closing)
    return None


def _tag_pattern(tokenizer: Tokenizer) -> str:
    """Return a pattern of possible marks: added tokens and tags."""
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    tokens = [re.escape(token) for token in added if token.strip()]
    return "(?:" + "|".join([*tokens, r"</?[^<>\s]{1,60}>", r"\[/?[A-Z][A-Z_ ]*\]"]) + ")"


def _around_answer(probe: TemplateProbe) -> tuple[str, str]:
    """Return the text between a user message and a plain answer in an earlier turn, and the text after the answer."""
    text = probe.text([_USER, PLAIN_ANSWER, NEXT_USER]) or ""
    before, _, after = text.partition(_USER["content"])[2].partition(ANSWER)
    return before, after


def _find_answer(probe: TemplateProbe, ending: Ending, thoughts: ThoughtMarks | None) -> tuple[str, str]:
    """Return the sampled text before an answer, and between the answer and the end-of-turn token."""
    before, after = _around_answer(probe)
    prompt = (probe.text([_USER]) or "").partition(_USER["content"])[2]
    closing = after[: ending.offset]
    if thoughts is not None:
        if thoughts.is_open_at_end(prompt):
            prompt = prompt.rstrip().removesuffix(thoughts.opening)
        if thoughts.closing in before:
            opening = before.rpartition(thoughts.closing)[2]
            if thoughts.closing in prompt:
                opening = opening.removeprefix(prompt.rpartition(thoughts.closing)[2])
            return opening, closing
        prompt = thoughts.without_empty(prompt)
    if before.startswith(prompt):
        return before[len(prompt) :], closing
    return "", closing
