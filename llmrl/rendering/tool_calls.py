"""Reading tool calls out of sampled text, by format; a call that cannot be read comes back as malformed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llmrl.data import MalformedToolCall


@dataclass(frozen=True, slots=True)
class ParsedCalls:
    """A text split into what is said and what is called."""

    content: str
    """The text without its well-formed calls; malformed ones stay in it, so that the history shows them."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """`{"type": "function", "function": {"name", "arguments"}}`, arguments a dict."""
    malformed: tuple[MalformedToolCall, ...] = ()


ToolCallParser = Callable[[str], ParsedCalls]
"""Splits the text of a completion; never raises."""

TOOL_CALL_PARSERS: dict[str, ToolCallParser] = {}
"""Known parsers by name."""

# json.loads and ast.parse raise these, and nothing else, on hostile text.
_UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError)


def register_tool_call_parser(name: str) -> Callable[[ToolCallParser], ToolCallParser]:
    """Decorator that makes a parser known under `name`.

    Raises:
        ValueError: when the name is taken.
    """

    def register(parser: ToolCallParser) -> ToolCallParser:
        if name in TOOL_CALL_PARSERS:
            raise ValueError(f"name {name!r} is taken; registered are {sorted(TOOL_CALL_PARSERS)}.")
        TOOL_CALL_PARSERS[name] = parser
        return parser

    return register


def find_tool_call_parser(name: str) -> ToolCallParser:
    """The parser of that name.

    Raises:
        ValueError: when there is none, naming those there are.
    """
    if name not in TOOL_CALL_PARSERS:
        raise ValueError(f"tool_parser must be one of {sorted(TOOL_CALL_PARSERS)}, got {name!r}.")
    return TOOL_CALL_PARSERS[name]


def choose_tool_call_parser(chat_template: str) -> str:
    """Name of the parser that fits a chat template, told by the marks it writes around calls.

    Example:
        >>> choose_tool_call_parser("... <tool_call> ..."), choose_tool_call_parser("{{ message.content }}")
        ('hermes', 'none')
    """
    if "<tool_call>" in chat_template:
        return "xml" if "<function=" in chat_template else "hermes"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<|python_start|>" in chat_template or re.search(r"\[func_name1\(", chat_template):
        return "pythonic"
    if "<|python_tag|>" in chat_template or "ipython" in chat_template:
        return "llama3_json"
    return "none"


def make_tool_call(name: str, arguments: Mapping[str, Any], *, call_id: str | None = None) -> dict[str, Any]:
    """A tool call in the chat-template convention.

    Example:
        >>> make_tool_call("add", {"a": 1})
        {'type': 'function', 'function': {'name': 'add', 'arguments': {'a': 1}}}
    """
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}
    if call_id is not None:
        call["id"] = call_id
    return call


@register_tool_call_parser("none")
def parse_no_calls(text: str) -> ParsedCalls:
    """Everything is content."""
    return ParsedCalls(text)


@register_tool_call_parser("hermes")
def parse_hermes(text: str) -> ParsedCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.

    Example:
        >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').content
        'Let me see.'
    """
    return _parse_tagged(text, _read_json_call)


@register_tool_call_parser("xml")
def parse_xml(text: str) -> ParsedCalls:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, any number of them.

    A value is read as JSON where it is JSON, else as text.
    """
    return _parse_tagged(text, _read_xml_call)


@register_tool_call_parser("mistral")
def parse_mistral(text: str) -> ParsedCalls:
    """`[TOOL_CALLS]` before a JSON list of calls, or before each `NAME[ARGS]{...}`."""
    content, *pieces = text.split("[TOOL_CALLS]")
    calls: list[dict[str, Any]] = []
    malformed: list[MalformedToolCall] = []
    for piece in pieces:
        try:
            calls.extend(_read_mistral_piece(piece.strip(), len(calls)))
        except _UNREADABLE as error:
            malformed.append(MalformedToolCall(f"[TOOL_CALLS]{piece}", _reason(error)))
    return _finish(content + "".join(bad.raw for bad in malformed), calls, malformed)


@register_tool_call_parser("llama3_json")
def parse_llama3_json(text: str) -> ParsedCalls:
    """The whole text is `{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`; several by `;`."""
    is_tagged = text.lstrip().startswith("<|python_tag|>")
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not is_tagged and not re.match(r'\{\s*"(name|type|parameters|function)"\s*:', body):
        return ParsedCalls(text)
    calls: list[dict[str, Any]] = []
    decoder, position = json.JSONDecoder(), 0
    try:
        while position < len(body):
            value, position = decoder.raw_decode(body, position)
            calls.append(_check_call(value))
            separator = re.compile(r"[\s;]*").match(body, position)
            position = separator.end() if separator else position
    except _UNREADABLE as error:
        malformed = MalformedToolCall(body[position:] if calls else text, _reason(error))
        return _finish(malformed.raw, calls, [malformed])
    return _finish("", calls, [])


@register_tool_call_parser("pythonic")
def parse_pythonic(text: str) -> ParsedCalls:
    """The whole text is a Python list of calls with keyword arguments: `[add(a=1, b=2)]`.

    Example:
        >>> parse_pythonic("[add(a=1, b=[2])]").tool_calls[0]["function"]
        {'name': 'add', 'arguments': {'a': 1, 'b': [2]}}
    """
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", body):
        return ParsedCalls(text)
    try:
        tree = ast.parse(body, mode="eval").body
        if not isinstance(tree, ast.List):
            raise ValueError("a list of calls is expected")
        calls = [_read_pythonic_call(node) for node in tree.elts]
    except _UNREADABLE as error:
        return ParsedCalls(text, malformed=(MalformedToolCall(text, _reason(error)),))
    return _finish("", calls, [])


@register_tool_call_parser("fenced")
def parse_fenced(text: str) -> ParsedCalls:
    """Fenced blocks marked `tool_call` with a JSON call in each, or marked `json` where the JSON is a call.

    Example:
        >>> text = '```tool_call\\n{"name": "add", "arguments": {"a": 1}}\\n```'
        >>> parse_fenced(text).tool_calls[0]["function"]["name"]
        'add'
    """
    calls: list[dict[str, Any]] = []
    malformed: list[MalformedToolCall] = []

    def read(block: re.Match[str]) -> str:
        is_call = block[1] == "tool_call"
        try:
            value = json.loads(block[2])
            if is_call or (isinstance(value, dict) and {"name", "arguments"} <= set(value)):
                calls.append(_check_call(value))
                return ""
        except _UNREADABLE as error:
            if is_call:
                malformed.append(MalformedToolCall(block[0], _reason(error)))
        return block[0]

    content = re.sub(r"^```(tool_call|json)[^\S\n]*\n(.*?)^```", read, text, flags=re.DOTALL | re.MULTILINE)
    return _finish(content, calls, malformed)


def _parse_tagged(text: str, read: Callable[[str], dict[str, Any]]) -> ParsedCalls:
    content: list[str] = []
    calls: list[dict[str, Any]] = []
    malformed: list[MalformedToolCall] = []
    position = 0
    while (start := text.find("<tool_call>", position)) >= 0:
        content.append(text[position:start])
        end = text.find("</tool_call>", start)
        stop = len(text) if end < 0 else end + len("</tool_call>")
        raw = text[start:stop]
        try:
            if end < 0:
                raise ValueError("the call is not closed by </tool_call>")
            calls.append(read(text[start + len("<tool_call>") : end]))
        except _UNREADABLE as error:
            malformed.append(MalformedToolCall(raw, _reason(error)))
            content.append(raw)
        position = stop
    content.append(text[position:])
    return _finish("".join(content), calls, malformed)


def _finish(content: str, calls: list[dict[str, Any]], malformed: list[MalformedToolCall]) -> ParsedCalls:
    # Templates put their own white space between the content and a call; what was sampled there would double it.
    return ParsedCalls(content.strip() if calls else content, tuple(calls), tuple(malformed))


def _read_json_call(body: str) -> dict[str, Any]:
    return _check_call(json.loads(body))


def _read_xml_call(body: str) -> dict[str, Any]:
    function = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
    if function is None:
        raise ValueError("<function=NAME>...</function> is expected")
    arguments: dict[str, Any] = {}
    for key, value in re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL):
        try:
            arguments[key] = json.loads(value)
        except _UNREADABLE:
            arguments[key] = value
    return make_tool_call(function[1], arguments)


def _read_mistral_piece(piece: str, num_before: int) -> list[dict[str, Any]]:
    named = re.match(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?(?=\s*\{)", piece)
    if named is not None:
        value = {"name": named[1], "arguments": json.loads(piece[named.end() :]), "id": named[2]}
        values = [value]
    else:
        values = json.loads(piece)
        if not isinstance(values, list):
            raise ValueError("a list of calls is expected")
    # This family's templates ask for ids of nine letters or digits.
    return [_check_call(value, default_id=f"call{num_before + index:05d}") for index, value in enumerate(values)]


def _read_pythonic_call(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("calls with keyword arguments are expected")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("calls with named arguments are expected, not **")
        arguments[keyword.arg] = ast.literal_eval(keyword.value)
    return make_tool_call(ast.unparse(node.func), arguments)


def _check_call(value: Any, *, default_id: str | None = None) -> dict[str, Any]:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("a JSON object with 'name' and 'arguments' is expected")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("'name' is missing or no string")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("'arguments' is no JSON object")
    call_id = value.get("id")
    return make_tool_call(name, arguments, call_id=call_id if isinstance(call_id, str) else default_id)


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
