"""Registry of tool-call parsers, and the functions that their formats share."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from llmrl._utils.failure import describe
from llmrl.data import MalformedToolCall, ToolSchema
from llmrl.data.message import encodable

Json: TypeAlias = Any
"""A JSON value."""

Arguments: TypeAlias = Mapping[str, Json]
"""Arguments of a call by name."""

ToolCall: TypeAlias = dict[str, Json]
"""`{"type": "function", "id"?, "function": {"name", "arguments"}}`, with arguments as a dict."""


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """Content and tool calls of a completion."""

    content: str
    """The text without its well-formed calls; malformed calls stay in it, so the history shows them."""
    tool_calls: tuple[ToolCall, ...] = ()
    """`{"type": "function", "function": {"name", "arguments"}}` each, with arguments as a dict."""
    malformed: tuple[MalformedToolCall, ...] = ()


class ToolCallParser(Protocol):
    """Protocol of parsers of a completion's text."""

    def __call__(self, text: str, tools: Sequence[ToolSchema] = (), /) -> ParsedCalls:
        """Return content and calls of `text`; never raise. `tools` provide argument types that the format omits."""


ToolCallWriter = Callable[[str, Arguments], str]
"""Function of a name and arguments that returns a call as the model should write it."""

TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {}
"""Registered parsers by name."""

TOOL_CALL_WRITERS: dict[str, ToolCallWriter] = {}
"""Writers by parser name, for templates that do not write calls."""

TOOL_CALL_OPENINGS: dict[str, tuple[str, ...]] = {}
"""Texts with which calls begin, by parser name; an empty one means that a call may begin anywhere."""

# All exceptions that json.loads, ast.parse and ast.literal_eval raise on malformed text.
UNREADABLE = (ValueError, TypeError, SyntaxError, RecursionError, MemoryError)


def register_tool_call_parser(
    name: str, *, write: ToolCallWriter | None = None, openings: Sequence[str] = ("",)
) -> Callable[[ToolCallParser], ToolCallParser]:
    """Return a decorator that registers a parser and an optional writer, or raises ValueError if the name is taken.

    A call begins with one of `openings`; the text before it can be streamed while an answer is sampled.
    """

    def register(parser: ToolCallParser) -> ToolCallParser:
        if name in TOOL_CALL_PARSERS:
            raise ValueError(f"the parser name {name!r} is taken; registered names: {sorted(TOOL_CALL_PARSERS)}.")
        TOOL_CALL_PARSERS[name] = parser
        TOOL_CALL_OPENINGS[name] = tuple(openings)
        if write is not None:
            TOOL_CALL_WRITERS[name] = write
        return parser

    return register


def find_tool_call_parser(name: str) -> ToolCallParser:
    """Return the parser of that name; raise ValueError, with all names, if it is unknown."""
    if name not in TOOL_CALL_PARSERS:
        raise ValueError(f"tool_parser must be one of {sorted(TOOL_CALL_PARSERS)}, got {name!r}.")
    return TOOL_CALL_PARSERS[name]


def make_tool_call(name: str, arguments: Arguments, *, call_id: str | None = None) -> ToolCall:
    """Return a tool call in the chat-template convention; ValueError if the arguments are not JSON.

    Lone surrogates in its texts are replaced.

    Example:
        >>> make_tool_call("add", {"a": 1, "b": (2, 3)})
        {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1, 'b': [2, 3]}}}
    """
    try:
        plain = json.loads(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the arguments are not JSON: {error}") from error
    call: ToolCall = {"type": "function", "function": {"name": name, "arguments": plain}}
    if call_id is not None:
        call["id"] = call_id
    return encodable(call)


def check_call(value: Json) -> ToolCall:
    """Return a call, given its JSON value in a common form; raise ValueError if it is malformed."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        raise ValueError("a JSON object with 'name' and 'arguments' is expected")
    name = value.get("name", value.get("tool_name"))
    if not isinstance(name, str) or not name:
        raise ValueError("'name' is missing or not a string")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("'arguments' is not a JSON object")
    call_id = value.get("id")
    return make_tool_call(name, arguments, call_id=call_id if isinstance(call_id, str) else None)


def finish(content: str, calls: Sequence[ToolCall], malformed: Sequence[MalformedToolCall]) -> ParsedCalls:
    """Return the parsed text; content next to calls is stripped of the template's white space."""
    return ParsedCalls(content.strip() if calls else content, tuple(calls), tuple(malformed))


def read_between(text: str, opening: str, closing: str, read: Callable[[str], list[ToolCall]]) -> ParsedCalls:
    """Return the calls that `read` finds between the marks, and other text as content; no `closing`: up to the end."""
    content: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    position = 0
    while (start := text.find(opening, position)) >= 0:
        content.append(text[position:start])
        end = text.find(closing, start) if closing else len(text)
        stop = len(text) if end < 0 else end + len(closing)
        raw = text[start:stop]
        try:
            if end < 0:
                raise ValueError(f"the call is not closed by {closing}")
            calls += read(text[start + len(opening) : end])
        except UNREADABLE as error:
            malformed.append(MalformedToolCall(raw, reason_of(error)))
            content.append(raw)
        position = stop
    content.append(text[position:])
    return finish("".join(content), calls, malformed)


def reason_of(error: BaseException) -> str:
    """Return the reason of a parsing error as text for the model."""
    return str(error) if isinstance(error, ValueError) else describe(error)


def read_text(text: str, schema: Json) -> Json:
    """Return the value of bare text by its schema, otherwise as JSON if it is valid; a schema of None is unknown.

    Example:
        >>> properties = {"zip": {"type": "string"}}
        >>> tool = {"function": {"name": "find", "parameters": {"properties": properties}}}
        >>> [read_text("90210", schema_of("find", "zip", tools)) for tools in ([tool], [])]
        ['90210', 90210]
    """
    types = schema_types(schema)
    value: Json = text
    try:
        value = json.loads(text)
    except UNREADABLE:
        if types - {"string"}:  # some templates write Python literals
            with contextlib.suppress(*UNREADABLE):
                value = ast.literal_eval(text)
    # Quotes that the model wrote belong to its text.
    if "string" in types and (isinstance(value, str) or types.isdisjoint(_json_types(value))):
        return text
    return value


def schema_of(name: str, key: str, tools: Sequence[ToolSchema]) -> Json:
    """Return the schema of an argument; None if unknown."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return schema_of_property(function.get("parameters"), key)
    return None


def schema_of_property(schema: Json, key: str) -> Json:
    """Return the schema of an object's property; None if unknown."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def schema_types(schema: Json) -> set[str]:
    """Return the JSON types that a schema allows; empty if unspecified."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    types: set[str] = set()
    if isinstance(kind, str):
        types = {kind}
    elif isinstance(kind, Sequence):
        types = set(kind)
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        types |= schema_types(choice)
    if "enum" in schema:
        types |= {name for value in schema["enum"] for name in _json_types(value)}
    return types


def _json_types(value: Json) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    if isinstance(value, list):
        return {"array"}
    return {"object"}


# Other JSON lists of objects with a type are answers.
_ANTHROPIC_TYPES = ("text", "tool_use", "thinking", "redacted_thinking")


@register_tool_call_parser("anthropic")
def parse_anthropic(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read a JSON list of Anthropic's blocks, or a message with them, with calls as `tool_use`.

    Example:
        >>> parse_anthropic('[{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]').tool_calls[0]["id"]
        '1'
    """
    try:
        value = json.loads(text)
    except UNREADABLE:
        return ParsedCalls(text)
    blocks = value.get("content") if isinstance(value, dict) else value
    if not isinstance(blocks, list) or not blocks:
        return ParsedCalls(text)
    if not all(isinstance(block, dict) and block.get("type") in _ANTHROPIC_TYPES for block in blocks):
        return ParsedCalls(text)
    said: list[str] = []
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for block in blocks:
        if block["type"] == "tool_use":
            try:
                calls.append(check_call({**block, "arguments": block.get("input", {})}))
            except UNREADABLE as error:
                malformed.append(MalformedToolCall(json.dumps(block), reason_of(error)))
        elif block["type"] == "text":
            said.append(str(block.get("text", "")))
    return finish("\n".join(said), calls, malformed)
