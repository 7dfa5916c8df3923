"""Parsers of tool calls that write each argument between tags, mostly as bare text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from llmrl.data import ToolSchema
from llmrl.rendering.tool_calls import (
    Json,
    ParsedCalls,
    ToolCall,
    make_tool_call,
    read_between,
    read_text,
    register_tool_call_parser,
    schema_of,
    schema_of_property,
    schema_types,
)


class _Tags:
    """Patterns of calls with name and arguments between tags.

    Args:
        begin: start of a call, with its name in the group `name`.
        argument: one argument, in the groups `key` and `value`; an optional group `kind` is `string` or `true` for
            text and anything else for JSON. Without `kind`, the tool's schema determines the type.
        end: end of a call.
    """

    def __init__(self, begin: str, argument: str, end: str) -> None:
        pieces = (begin, argument, end)
        self._begin, self._argument, self._end = (re.compile(rf"\s*{piece}", re.DOTALL) for piece in pieces)

    def read(self, text: str, tools: Sequence[ToolSchema]) -> list[ToolCall]:
        """Return the calls in a text; raise ValueError for other text or a duplicate argument."""
        calls: list[ToolCall] = []
        position = 0
        while begun := self._begin.match(text, position):
            position = begun.end()
            arguments = {}
            while written := self._argument.match(text, position):
                position = written.end()
                key = written["key"].strip()
                if key in arguments:
                    raise ValueError(f"the argument {key!r} is written twice")
                arguments[key] = self._value(written, begun["name"], tools)
            ended = self._end.match(text, position)
            if ended is None:
                raise ValueError(f"an argument or the end of the call is expected at {text[position:]!r:.60}")
            position = ended.end()
            calls.append(make_tool_call(begun["name"], arguments))
        if not calls or text[position:].strip():
            raise ValueError(f"a call is expected at {text[position:]!r:.60}")
        return calls

    def _value(self, written: re.Match[str], name: str, tools: Sequence[ToolSchema]) -> Json:
        kind = written.groupdict().get("kind")
        if kind is None:
            return read_text(written["value"], schema_of(name, written["key"].strip(), tools))
        return written["value"] if kind in ("string", "true") else json.loads(written["value"])


def _functions(value: str) -> _Tags:
    """Return the tags `<function=NAME>` and `<parameter=KEY>`, with `value` as the pattern of a value."""
    return _Tags(r"<function=(?P<name>[^>\s]+)>", rf"<parameter=(?P<key>[^>\s]+)>{value}</parameter>", r"</function>")


def _invocations(prefix: str = "") -> _Tags:
    """Return the tags `invoke` and `parameter` with names as attributes and an optional prefix of each tag."""
    kind = r'(?: string="(?P<kind>true|false)")?'
    return _Tags(
        rf'<{prefix}invoke name="(?P<name>[^"]+)">',
        rf'<{prefix}parameter name="(?P<key>[^"]+)"{kind}>(?P<value>.*?)</{prefix}parameter>',
        rf"</{prefix}invoke>",
    )


_PAIRS = _Tags(
    r"(?P<name>[\w.-]+)(?=\s*(?:<arg_key>|$))",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    r"$",
)


@dataclass(frozen=True)
class _Tagged:
    """Parser of one or more calls between two marks; a class so that it can be pickled."""

    opening: str
    closing: str
    tags: _Tags

    def __call__(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        return read_between(text, self.opening, self.closing, lambda body: self.tags.read(body, tools))


for _name, _block, _tags in (
    ("xml", "tool_call", _functions(r"\n?(?P<value>.*?)\n?")),
    ("glm", "tool_call", _PAIRS),
    ("seed_oss", "seed:tool_call", _functions(r"(?P<value>.*?)")),
    ("minimax_m2", "minimax:tool_call", _invocations()),
    ("deepseek_v32", "｜DSML｜function_calls", _invocations("｜DSML｜")),
    ("deepseek_v4", "｜DSML｜tool_calls", _invocations("｜DSML｜")),
    ("deepseek_v41", "｜DSML｜ calls", _invocations("｜DSML｜ ")),
):
    register_tool_call_parser(_name, openings=[f"<{_block}>"])(_Tagged(f"<{_block}>", f"</{_block}>", _tags))

_MARK = "]<]minimax[>["
_ELEMENT = re.compile(rf"\s*{re.escape(_MARK)}<(?P<key>[^<>/\s]+)>")
_INVOKED = re.compile(rf'\s*{re.escape(_MARK)}<invoke name="(?P<name>[^"]+)">')
_MAX_DEPTH = 100


@register_tool_call_parser("minimax_m3", openings=[f"{_MARK}<tool_call>"])
def parse_minimax_m3(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read calls with nested elements as arguments and a mark before each tag.

    Example:
        >>> written = '<tool_call><invoke name="add"><a>1</a></invoke></tool_call>'
        >>> parse_minimax_m3(written.replace("<", "]<]minimax[>[<")).tool_calls[0]["function"]
        {'name': 'add', 'arguments': {'a': 1}}
    """

    def read(body: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        position = 0
        while begun := _INVOKED.match(body, position):
            name = begun["name"]
            arguments, position = _read_elements(body, begun.end(), partial(schema_of, name, tools=tools))
            position = _after(f"{_MARK}</invoke>", body, position)
            calls.append(make_tool_call(name, dict(arguments)))
        if not calls or body[position:].strip():
            raise ValueError(f"a call is expected at {body[position:]!r:.60}")
        return calls

    return read_between(text, f"{_MARK}<tool_call>", f"{_MARK}</tool_call>", read)


def _read_elements(
    text: str, position: int, schema: Callable[[str], Json], depth: int = 0
) -> tuple[list[tuple[str, Json]], int]:
    """Return the elements at a position and their end; `schema` returns the schema of a key's value."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"at most {_MAX_DEPTH} elements may be nested")
    elements: list[tuple[str, Json]] = []
    while begun := _ELEMENT.match(text, position):
        key = begun["key"]
        position = begun.end()
        if key != "item" and any(key == other for other, _ in elements):
            raise ValueError(f"the argument {key!r} is written twice")
        expected = schema(key)
        children, end = _read_elements(text, position, partial(_schema_within, expected), depth + 1)
        types = schema_types(expected)

        if not children:
            end = text.find(_MARK, position)
            value = _empty_or_read(text[position : end if end >= 0 else len(text)], expected)
        elif "array" in types or ("object" not in types and all(name == "item" for name, _ in children)):
            value = [child for _, child in children]
        else:
            value = dict(children)
        position = _after(f"{_MARK}</{key}>", text, end)
        elements.append((key, value))
    return elements, position


def _empty_or_read(text: str, schema: Json) -> Json:
    empty: dict[str, Json] = {"array": [], "object": {}}
    kinds = schema_types(schema)
    if not text and kinds and kinds <= set(empty):
        return empty[min(kinds)]
    return read_text(text, schema)


def _schema_within(schema: Json, key: str) -> Json:
    """Return the schema of a child element: an array's item or an object's property."""
    if key == "item" and isinstance(schema, Mapping) and "items" in schema:
        return schema["items"]
    return schema_of_property(schema, key)


def _after(closing: str, text: str, position: int) -> int:
    """Return the position after a required closing tag, which white space may precede."""
    rest = text[position:].lstrip() if position >= 0 else ""
    if not rest.startswith(closing):
        raise ValueError(f"{closing} is expected at {rest!r:.60}")
    return len(text) - len(rest) + len(closing)
