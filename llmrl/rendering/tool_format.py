"""Selection of the parser that reads a chat template's tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from llmrl.data.content_marks import RenderingError
from llmrl.rendering.probing import ANSWER, TemplateProbe
from llmrl.rendering.tool_calls import (
    TOOL_CALL_PARSERS,
    TOOL_CALL_WRITERS,
    ToolCallParser,
    ToolCallWriter,
    find_tool_call_parser,
)

# Marks of model families with templates that show tools but write no calls, and the parsers of their calls.
_MARKS_OF_UNWRITTEN = {
    "<|tool_list_start|>": "lfm2",
    "<|tool_call_start|>": "lfm2",
    "<|observation|>": "glm4",
    "<TOOLCALL>": "nemotron",
    "<|/tool_call|>": "phi4",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Parser of calls, and their writer if the template does not write calls."""

    name: str
    """Name of the parser."""
    parse: ToolCallParser
    write: ToolCallWriter | None
    """Function that writes a call into a message's content; None if the template writes calls."""


def choose_tool_format(probe: TemplateProbe, tool_parser: str) -> ToolFormat:
    """Return the format with the parser of that name; `auto` selects a parser that reads the template's calls.

    If the template writes no calls, or shows no tools and writes calls that the parser does not
    read, llmrl writes the calls. Raises RenderingError if the template shows tools and its calls
    are not read, and ValueError if the parser is unknown or lacks a required writer.
    """
    writer = probe.writer
    is_written_by_us = writer.write_call is not None
    name = tool_parser
    is_read = True
    if name == "auto":
        if is_written_by_us:
            found = (each for mark, each in _MARKS_OF_UNWRITTEN.items() if mark in writer.chat_template)
        else:
            found = (each for each, parse in TOOL_CALL_PARSERS.items() if probe.is_call_read(parse))
        is_read = (first := next(found, None)) is not None
        name = first or "hermes"
    elif name != "none" and not is_written_by_us:
        is_read = probe.is_call_read(find_tool_call_parser(name))
    if not is_read:
        if not writer.is_tool_prompt_added:
            raise _unread(probe, tool_parser)
        is_written_by_us = True
    parse = find_tool_call_parser(name)
    if not is_written_by_us:
        return ToolFormat(name, parse, None)
    written = "hermes" if name == "none" else name
    if written not in TOOL_CALL_WRITERS:
        raise ValueError(
            f"tool_parser={name!r} has no writer, which this chat template needs, since it writes no calls in that "
            f"format; take one of {sorted(TOOL_CALL_WRITERS)}, or register yours with write=."
        )
    return ToolFormat(name, parse, TOOL_CALL_WRITERS[written])


def _unread(probe: TemplateProbe, tool_parser: str) -> RenderingError:
    written = probe.written_call("f", {"value": ANSWER})
    shown = f"writes a call as {written!r}" if written else "does not write calls"
    reader = "no parser" if tool_parser == "auto" else f"tool_parser={tool_parser!r}"
    return RenderingError(
        f"The chat template of {probe.writer.model_name!r} shows tools and {shown}, which {reader} reads, so "
        f"calls would be taken for answers. tool_parser is one of {sorted(TOOL_CALL_PARSERS)}; register another "
        "(llmrl.rendering.register_tool_call_parser), use backend='renderers' if that package supports the model, or "
        "pass tool_parser='none' if no tools are used."
    )
