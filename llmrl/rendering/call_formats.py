"""Parsers of tool-call formats, which return unreadable calls as malformed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmrl.data import MalformedToolCall, ToolSchema
from llmrl.rendering.tool_calls import (
    UNREADABLE,
    Arguments,
    Json,
    ParsedCalls,
    ToolCall,
    check_call,
    finish,
    make_tool_call,
    read_between,
    reason_of,
    register_tool_call_parser,
)


def _json_call(name: str, arguments: Arguments) -> str:
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


def _tagged(name: str, arguments: Arguments) -> str:
    return f"<tool_call>\n{_json_call(name, arguments)}\n</tool_call>"


@register_tool_call_parser("none", openings=())
def parse_no_calls(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Return the whole text as content."""
    return ParsedCalls(text)


@register_tool_call_parser("hermes", write=_tagged, openings=["<tool_call>"])
def parse_hermes(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read any number of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Example:
        >>> parse_hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>').content
        'Let me see.'
    """
    return read_between(text, "<tool_call>", "</tool_call>", lambda body: [check_call(json.loads(body))])


def _lines_of_name_and_json(name: str, arguments: Arguments) -> str:
    return f"{name}\n{json.dumps(arguments, ensure_ascii=False)}"


@register_tool_call_parser("glm4", write=_lines_of_name_and_json)
def parse_glm4(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    r"""Read one or more calls: a name and a JSON object on the next line, each optionally after `<|assistant|>`.

    Prose may have this form, too: if `tools` are given, one of the calls must be to one of them, or all is content.
    Invalid JSON is a malformed call if a tool has that name or another call precedes it.

    Example:
        >>> parse_glm4('add\n{"a": 1}').tool_calls[0]["function"]
        {'name': 'add', 'arguments': {'a': 1}}
    """
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    offered = {tool.get("function", tool).get("name") for tool in tools}
    names: list[str] = []
    position = 0
    start = re.compile(r"\s*(?:<\|assistant\|>\s*)?([A-Za-z_][\w.-]*)[^\S\n]*\n\s*(?=\{)")
    while begun := start.match(text, position):
        names.append(begun[1])
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, begun.end())
            calls.append(make_tool_call(begun[1], arguments))
        except UNREADABLE as error:
            malformed.append(MalformedToolCall(text[position:], reason_of(error)))
            break
        position = end
    rest = text[position:]
    if offered.isdisjoint(names) and (offered or not calls):
        return ParsedCalls(text)
    if rest.strip() and not malformed:
        malformed.append(MalformedToolCall(rest, "a name, a line break and a JSON object are expected"))
    return finish(rest, calls, malformed)


@register_tool_call_parser("mistral", openings=["[TOOL_CALLS]"])
def parse_mistral(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read `[TOOL_CALLS]` followed by a JSON list of calls or by `NAME[ARGS]{...}`."""
    content, *pieces = text.split("[TOOL_CALLS]")
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []
    for piece in pieces:
        try:
            calls.extend(_read_mistral_piece(piece.strip(), len(calls)))
        except UNREADABLE as error:
            malformed.append(MalformedToolCall(f"[TOOL_CALLS]{piece}", reason_of(error)))
    return finish(content + "".join(bad.raw for bad in malformed), calls, malformed)


@register_tool_call_parser("llama3_json", openings=["{", "<|python_tag|>"])
def parse_llama3_json(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read `{"name": ..., "parameters": {...}}`, optionally after `<|python_tag|>`; `;` separates several calls.

    Without the tag, a JSON object that lacks a name or parameters is an answer.
    """
    is_tagged = text.lstrip().startswith("<|python_tag|>")
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not is_tagged and not _may_be_llama3_call(body):
        return ParsedCalls(text)
    calls: list[ToolCall] = []
    decoder = json.JSONDecoder()
    position = 0
    try:
        while position < len(body):
            value, position = decoder.raw_decode(body, position)
            calls.append(check_call(value))
            position = _skip_space(body, position, also=";")
    except UNREADABLE as error:
        malformed = MalformedToolCall(body[position:] if calls else text, reason_of(error))
        return finish(malformed.raw, calls, [malformed])
    return finish("", calls, [])


def _may_be_llama3_call(body: str) -> bool:
    if not re.match(r'\{\s*"(name|type|parameters|function)"\s*:', body):
        return False
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except UNREADABLE:
        return True  # a call that was cut
    if isinstance(value.get("function"), dict):
        value = value["function"]
    has_name = "name" in value or "tool_name" in value
    return has_name and ("parameters" in value or "arguments" in value)


@register_tool_call_parser("pythonic", openings=["[", "<|python_start|>"])
def parse_pythonic(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read a Python list of calls with keyword arguments: `[add(a=1, b=2)]`.

    Example:
        >>> parse_pythonic("[add(a=1, b=[2])]").tool_calls[0]["function"]
        {'name': 'add', 'arguments': {'a': 1, 'b': [2]}}
    """
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not re.match(r"\[\s*[A-Za-z_][\w.]*\(", body):
        return ParsedCalls(text)
    try:
        calls = _read_pythonic_list(body)
    except UNREADABLE as error:
        return ParsedCalls(text, malformed=(MalformedToolCall(text, reason_of(error)),))
    return finish("", calls, [])


def _pythonic_in_marks(name: str, arguments: Arguments) -> str:
    written = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return f"<|tool_call_start|>[{name}({written})]<|tool_call_end|>"


@register_tool_call_parser("lfm2", write=_pythonic_in_marks, openings=["<|tool_call_start|>"])
def parse_lfm2(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read `<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>`, or a JSON list of calls between these marks."""

    def read(body: str) -> list[ToolCall]:
        body = body.strip()
        return _read_json_list(body) if re.match(r"\[?\s*\{", body) else _read_pythonic_list(body)

    return read_between(text, "<|tool_call_start|>", "<|tool_call_end|>", read)


@register_tool_call_parser("lfm2_raw", openings=["<|tool_call_start|>"])
def parse_lfm2_raw(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    r"""Read the format of `lfm2` without escapes in quoted texts (LFM2.5).

    Example:
        >>> text = "<|tool_call_start|>[say(text='it's a\\b')]<|tool_call_end|>"
        >>> print(parse_lfm2_raw(text).tool_calls[0]["function"]["arguments"]["text"])
        it's a\b
    """
    return read_between(
        text, "<|tool_call_start|>", "<|tool_call_end|>", lambda body: _read_pythonic_list(_with_escapes(body.strip()))
    )


@register_tool_call_parser("gemma4", openings=["<|tool_call>"])
def parse_gemma4(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read any number of `<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>`, with texts between `<|"|>` marks.

    Example:
        >>> parse_gemma4('<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>').tool_calls[0]["function"]
        {'name': 'add', 'arguments': {'a': 1, 'b': 'x'}}
    """
    parsed = read_between(text, "<|tool_call>", "<tool_call|>", lambda body: [_read_gemma4_call(body)])
    # Gemma's templates look up the function of a result by the call's id.
    calls = tuple({**call, "id": f"call{index:05d}"} for index, call in enumerate(parsed.tool_calls))
    return ParsedCalls(parsed.content, calls, parsed.malformed)


@register_tool_call_parser("deepseek", openings=["<｜tool▁call"])
def parse_deepseek(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, or `function` with fenced JSON."""
    parsed = read_between(
        text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", lambda body: [_read_deepseek_call(body)]
    )
    if not parsed.tool_calls:
        return parsed
    content = parsed.content.replace("<｜tool▁calls▁begin｜>", "").replace("<｜tool▁calls▁end｜>", "")
    return finish(content, parsed.tool_calls, parsed.malformed)


@register_tool_call_parser("fenced", openings=["```"])
def parse_fenced(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    r"""Read fenced blocks marked `tool_call` with a JSON call, or marked `json` if the JSON is a call.

    Example:
        >>> text = '```tool_call\n{"name": "add", "arguments": {"a": 1}}\n```'
        >>> parse_fenced(text).tool_calls[0]["function"]["name"]
        'add'
    """
    calls: list[ToolCall] = []
    malformed: list[MalformedToolCall] = []

    def read(block: re.Match[str]) -> str:
        is_call = block[1] == "tool_call"
        try:
            value = json.loads(block[2])
            if is_call or (isinstance(value, dict) and {"name", "arguments"} <= set(value)):
                calls.append(check_call(value))
                return ""
        except UNREADABLE as error:
            if is_call:
                malformed.append(MalformedToolCall(block[0], reason_of(error)))
        return block[0]

    content = re.sub(r"^```(tool_call|json)[^\S\n]*\n(.*?)^```", read, text, flags=re.DOTALL | re.MULTILINE)
    return finish(content, calls, malformed)


@dataclass(frozen=True)
class _JSONBetween:
    """Format of a JSON list of calls between two marks; the closing mark may be empty."""

    opening: str
    closing: str

    def __call__(self, text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        return read_between(text, self.opening, self.closing, _read_json_list)

    def write(self, name: str, arguments: Arguments) -> str:
        """Return one call as the model should write it."""
        return f"{self.opening}[{_json_call(name, arguments)}]{self.closing}"


for _name, _format in {
    "cohere": _JSONBetween("<|START_ACTION|>", "<|END_ACTION|>"),
    "nemotron": _JSONBetween("<TOOLCALL>", "</TOOLCALL>"),
    "hunyuan": _JSONBetween("<tool_calls>", "</tool_calls>"),
    "phi4": _JSONBetween("<|tool_call|>", "<|/tool_call|>"),
    "granite": _JSONBetween("<|tool_call|>", ""),
}.items():
    register_tool_call_parser(_name, write=_format.write, openings=[_format.opening])(_format)


@register_tool_call_parser("apertus", openings=["<|tools_prefix|>"])
def parse_apertus(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read `<|tools_prefix|>[{NAME: {...}}, ...]<|tools_suffix|>`: a JSON list of objects with one name each."""

    def read(body: str) -> list[ToolCall]:
        calls = json.loads(body)
        if not isinstance(calls, list) or not all(isinstance(call, dict) and len(call) == 1 for call in calls):
            raise ValueError("a list of objects, each with one function name as its only key, is expected")
        return [
            check_call({"name": name, "arguments": arguments}) for call in calls for name, arguments in call.items()
        ]

    return read_between(text, "<|tools_prefix|>", "<|tools_suffix|>", read)


@register_tool_call_parser("kimi_k2", openings=["<|tool_calls_section_begin|>"])
def parse_kimi_k2(text: str, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
    """Read a section of calls with ids `functions.NAME:INDEX` and JSON arguments.

    Example:
        >>> section = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
        >>> call = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        >>> parse_kimi_k2(section.format(call)).tool_calls[0]["id"]
        'functions.add:0'
    """
    return read_between(text, "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _read_kimi_section)


def _read_kimi_section(body: str) -> list[ToolCall]:
    calls: list[ToolCall] = []
    position = 0
    begin = re.compile(r"\s*<\|tool_call_begin\|>(?P<id>[^<]+)<\|tool_call_argument_begin\|>\s*")
    while begun := begin.match(body, position):
        call_id = begun["id"].strip()
        name = re.fullmatch(r"(?:functions\.)?(.+):\d+", call_id)
        if name is None:
            raise ValueError(f"functions.NAME:INDEX is expected, not {call_id!r:.60}")
        arguments, position = json.JSONDecoder().raw_decode(body, begun.end())
        calls.append(check_call({"name": name[1], "arguments": arguments, "id": call_id}))
        ended = re.compile(r"\s*<\|tool_call_end\|>").match(body, position)
        if ended is None:
            raise ValueError(f"<|tool_call_end|> is expected at {body[position:]!r:.60}")
        position = ended.end()
    if not calls or body[position:].strip():
        raise ValueError(f"<|tool_call_begin|> is expected at {body[position:]!r:.60}")
    return calls


def _read_json_list(body: str) -> list[ToolCall]:
    value = json.loads(body)
    return [check_call(each) for each in (value if isinstance(value, list) else [value])]


def _read_mistral_piece(piece: str, num_before: int) -> list[ToolCall]:
    named = re.match(r"([\w.-]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?(?=\s*\{)", piece)
    if named is not None:
        values = [{"name": named[1], "arguments": json.loads(piece[named.end() :]), "id": named[2]}]
    else:
        values = json.loads(piece)
        if not isinstance(values, list):
            raise ValueError("a list of calls is expected")
    calls = [check_call(value) for value in values]
    for index, call in enumerate(calls, num_before):
        # Mistral's templates refuse other ids than nine letters or digits; a model may sample one, or none.
        if not re.fullmatch("[A-Za-z0-9]{9}", call.get("id", "")):
            call["id"] = f"call{index:05d}"
    return calls


def _read_pythonic_list(body: str) -> list[ToolCall]:
    tree = ast.parse(body, mode="eval").body
    if not isinstance(tree, ast.List):
        raise ValueError("a list of calls is expected")
    return [_read_pythonic_call(node) for node in tree.elts]


_TEXT_BEGINS = re.compile(r"[(,]\s*\w+='")
# A quotation mark only ends a text if the next argument, the next call or the end of the list follows.
_TEXT_ENDS = re.compile(r"'(?=\s*(?:,\s*\w+=|\)\s*(?:,\s*[\w.]+\(|\]\s*$)))")


def _with_escapes(body: str) -> str:
    """Return a list of calls with its texts escaped as Python strings."""
    pieces: list[str] = []
    position = 0
    while begun := _TEXT_BEGINS.search(body, position):
        ended = _TEXT_ENDS.search(body, begun.end())
        if ended is None:
            break
        pieces += [body[position : begun.end() - 1], repr(body[begun.end() : ended.start()])]
        position = ended.end()
    return "".join([*pieces, body[position:]])


def _read_pythonic_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("calls with keyword arguments are expected")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("calls with named arguments are expected, not **")
        arguments[keyword.arg] = ast.literal_eval(_JSONConstants().visit(keyword.value))
    return make_tool_call(ast.unparse(node.func), arguments)


class _JSONConstants(ast.NodeTransformer):
    """Replaces JSON's constants in a Python expression, since templates mix both."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        constants = {"true": ast.Constant(True), "false": ast.Constant(False), "null": ast.Constant(None)}
        return constants.get(node.id, node)


def _read_gemma4_call(body: str) -> ToolCall:
    begun = re.match(r"\s*call:([\w.-]+)(?=\{)", body)
    if begun is None:
        raise ValueError("call:NAME{...} is expected")
    arguments, position = _read_gemma4_value(body, begun.end())
    if body[position:].strip():
        raise ValueError(f"nothing is expected after the arguments, not {body[position:]!r:.40}")
    return make_tool_call(begun[1], arguments)


_QUOTE = '<|"|>'


def _read_gemma4_value(text: str, position: int) -> tuple[Json, int]:
    """Return a value and its end; texts, and optionally keys, are between `<|"|>` marks."""
    position = _skip_space(text, position)
    if text.startswith(_QUOTE, position):
        end = text.find(_QUOTE, position + len(_QUOTE))
        if end < 0:
            raise ValueError(f"a text is not closed by {_QUOTE}")
        return text[position + len(_QUOTE) : end], end + len(_QUOTE)
    closing = {"{": "}", "[": "]"}.get(text[position : position + 1])
    if closing is None:
        word = re.compile(r"[^,{}\[\]:<]+").match(text, position)
        if word is None:
            raise ValueError(f"a value is expected at {text[position:]!r:.40}")
        bare = word[0].strip()
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(bare, bare)), word.end()
    pairs = {}
    items = []
    position = _skip_space(text, position + 1)
    while not text.startswith(closing, position):
        if closing == "}":
            key = re.compile(r'(?:<\|"\|>(.*?)<\|"\|>|([^:,{}\[\]<]+)):', re.DOTALL).match(text, position)
            if key is None:
                raise ValueError(f"KEY:VALUE is expected at {text[position:]!r:.40}")
            name = key[1] if key[1] is not None else key[2].strip()
            pairs[name], position = _read_gemma4_value(text, key.end())
        else:
            item, position = _read_gemma4_value(text, position)
            items.append(item)
        position = _skip_space(text, position)
        if text.startswith(",", position):
            position = _skip_space(text, position + 1)
        elif not text.startswith(closing, position):
            raise ValueError(f"a comma or {closing} is expected at {text[position:]!r:.40}")
    return (pairs if closing == "}" else items), position + 1


def _skip_space(text: str, position: int, *, also: str = "") -> int:
    """Return the position after white space and the characters in `also`."""
    while position < len(text) and (text[position].isspace() or text[position] in also):
        position += 1
    return position


def _read_deepseek_call(body: str) -> ToolCall:
    name, separator, written = body.partition("<｜tool▁sep｜>")
    if not separator:
        raise ValueError("<｜tool▁sep｜> is expected after the name")
    fenced = re.fullmatch(r"([\w.-]+)\s*```json(.*)```", written.strip(), re.DOTALL)
    if fenced is not None:
        name = fenced[1]
        written = fenced[2]
    return check_call({"name": name.strip(), "arguments": json.loads(written)})
