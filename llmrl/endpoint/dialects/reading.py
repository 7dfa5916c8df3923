"""Parsing of a client's JSON, with errors for the client."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from llmrl.data import Message, ToolSchema, check_messages
from llmrl.data.message import encodable
from llmrl.endpoint.requests import AnswerForm, RefusedRequest
from llmrl.rendering.tool_calls import Json, ToolCall

Body = Mapping[str, Json]
"""JSON object of a request."""

_KINDS = {
    str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list", dict: "an object",
}  # fmt: skip
_MAX_DEPTH = 64
_ROLES = {"system", "user", "assistant", "tool"}
OTHER_ROLES = {"developer": "system", "function": "tool"}
"""Other names of roles in chat completions."""
TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
"""Types of parts that are text, in chat completions and in responses."""


def parse_body(text: bytes) -> Body:
    """Return a request's JSON object. Raises RefusedRequest if the body is not one."""
    try:
        # The parser holds the GIL; a Python call at each object lets other threads run.
        body = json.loads(text, object_hook=_unchanged)
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"the request's body is not valid JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RefusedRequest(f"the request's body must be a JSON object, got {type(body).__name__}.")
    check_depth(body)
    return encodable(body)


def _unchanged(value: dict[str, Json]) -> dict[str, Json]:
    return value


def check_depth(value: Json, left: int = _MAX_DEPTH) -> None:
    """Raise RefusedRequest if a value is nested too deep to be serialized again."""
    if not left:
        raise RefusedRequest(f"the request's body is nested more than {_MAX_DEPTH} levels deep.")
    if isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            if isinstance(entry, dict | list):
                check_depth(entry, left - 1)


def entry_of(body: Body, name: str, kind: type, *, where: str = "", default: Json = None) -> Json:
    """Return an entry; None counts as missing. Raises RefusedRequest if it has another type than `kind`.

    Example:
        >>> entry_of({"n": 2}, "n", int), entry_of({}, "n", int, default=1)
        (2, 1)
    """
    value = body.get(name)
    if value is None:
        return default
    kinds = (int, float) if kind is float else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):  # a bool is an int
        raise RefusedRequest(f"{where}{name} must be {_KINDS[kind]}, got {value!r:.80}.")
    return value


def text_parts(content: Json, *, where: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a string or a list of text parts. Raises RefusedRequest for other parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedRequest(f"{where} must be a string or a list of parts, got {content!r:.80}.")
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        part = object_of(part, where=f"{where}[{number}]")
        if part.get("type") not in kinds:
            raise RefusedRequest(f"{where}[{number}] is of type {part.get('type')!r:.80}; only text is supported here.")
        name = "refusal" if "refusal" in part else "text"
        texts.append(entry_of(part, name, str, where=f"{where}[{number}].", default=""))
    return "".join(texts)


def object_of(value: Json, *, where: str) -> Body:
    """Return a JSON object. Raises RefusedRequest if the value is not an object."""
    if not isinstance(value, dict):
        raise RefusedRequest(f"{where} must be an object, got {value!r:.80}.")
    return value


def arguments_of(arguments: Json, *, where: str) -> Json:
    """Return a call's arguments, given as JSON. Raises RefusedRequest if they are not an object."""
    try:
        if arguments is None or isinstance(arguments, str):
            arguments = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise RefusedRequest(f"{where} is not valid JSON: {error}.") from error
    check_depth(arguments)
    return dict(object_of(arguments, where=where))


def call_of(call_id: Json, name: Json, arguments: Json) -> ToolCall:
    """Return a tool call as an entry of a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tools_of(body: Body, kind: str) -> list[Body]:
    """Return a request's tools of type `kind`."""
    tools = (object_of(tool, where="tools[]") for tool in entry_of(body, "tools", list, default=[]))
    return [tool for tool in tools if (tool.get("type") or kind) == kind]


def other_tools(body: Body, kind: str) -> list[str]:
    """Return the types of a request's tools other than `kind`."""
    tools = entry_of(body, "tools", list, default=[])
    types = (str(object_of(tool, where="tools[]").get("type") or kind) for tool in tools)
    return sorted({f"{name:.80}" for name in types} - {kind})


def refuse_other_tools(body: Body, kind: str) -> None:
    """Raise RefusedRequest if a tool of a request has another type than `kind`."""
    if others := other_tools(body, kind):
        raise RefusedRequest(f"tools of type {others} are not supported: only functions are.")


def function_of(body: Body, parameters: str, *, where: str) -> ToolSchema:
    """Return a tool; `parameters` names the entry of its schema. Raises RefusedRequest without a name."""
    name = entry_of(body, "name", str, where=where)
    if not name:
        raise RefusedRequest(f"{where}name is missing.")
    schema = entry_of(body, parameters, dict, where=where, default={"type": "object", "properties": {}})
    function = {"name": name}
    if (description := entry_of(body, "description", str, where=where)) is not None:
        function["description"] = description
    return {"type": "function", "function": {**function, "parameters": schema}}


def stops_of(value: Json, name: str) -> tuple[str, ...]:
    """Return stop strings, given as one or a list. Raises RefusedRequest if one is empty or no string."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RefusedRequest(f"{name} must be a string or a list of strings, none empty, got {value!r:.80}.")
    return tuple(stops)


def positive(value: int | None, name: str) -> int | None:
    """Return a number or None. Raises RefusedRequest if the number is below 1."""
    if value is not None and value < 1:
        raise RefusedRequest(f"{name} must be at least 1, got {value}.")
    return value


def checked(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return messages to render. Raises RefusedRequest if there are none, or one is invalid."""
    try:
        found = check_messages(list(messages))
    except (TypeError, ValueError) as error:
        raise RefusedRequest(str(error)) from error
    if not found:
        raise RefusedRequest("messages must have at least one message, got none.")
    if strangers := {message["role"] for message in found} - _ROLES:
        raise RefusedRequest(f"a message's role must be one of {sorted(_ROLES)}, got {sorted(strangers)[0]!r:.80}.")
    return found


_SAMPLING = {
    "temperature": float, "top_p": float, "min_p": float, "repetition_penalty": float, "top_k": int, "seed": int,
}  # fmt: skip


def sampling_of(body: Body) -> dict[str, Json]:
    """Return a request's fields of `SamplingConfig`. Raises RefusedRequest if one is no number."""
    asked = {name: entry_of(body, name, kind) for name, kind in _SAMPLING.items()}
    if asked["top_k"] is not None:
        asked["top_k"] = max(0, asked["top_k"])  # vLLM's -1 keeps all
    return {name: value for name, value in asked.items() if value is not None}


_WITHOUT_EFFECT = {
    "betas", "client_metadata", "include", "metadata", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "stream_options", "truncation", "user",
}  # fmt: skip
"""Options that do not change an answer."""
_MAX_OVERRIDDEN = 32


def overridden(body: Body, *known: str, tools: Iterable[Body] = ()) -> tuple[str, ...]:
    """Return the names of the options of a request that are ignored, because they are not in `known`.

    `tools` are the request's functions; their option `strict` is ignored, too.

    Example:
        >>> overridden({"model": "policy", "logit_bias": {"7": 1}, "verbosity": None}, "model")
        ('logit_bias',)
    """
    read = {*known, *_SAMPLING, *_WITHOUT_EFFECT, "tool_choice", "parallel_tool_calls"}
    asked = [f"{name:.80}" for name, value in body.items() if name not in read and value not in _UNSET]
    if any(tool.get("strict") for tool in tools):
        asked.append("tools.strict")
    if _choice_of(body.get("tool_choice"))[0] not in (None, "auto", "none", *_FORCED):
        asked.append("tool_choice")
    if body.get("parallel_tool_calls") is False:
        asked.append("parallel_tool_calls")
    return tuple(asked[:_MAX_OVERRIDDEN])


_UNSET: tuple[Json, ...] = (None, False, 0, "", [], {})


_FORCED = ("required", "any", "function", "tool")
"""Values of `tool_choice` that demand a call, in any dialect."""


def _choice_of(choice: Json) -> tuple[Json, Json]:
    """Return the kind of a `tool_choice`, and the name of its function."""
    if not isinstance(choice, dict):
        return choice, None
    named = choice.get("function")
    if not isinstance(named, dict):
        named = choice
    return choice.get("type"), named.get("name")


def form_of(body: Body, wanted: Body, option: str, tools: Sequence[ToolSchema]) -> AnswerForm | None:
    """Return the form that a request demands, by its `tool_choice` or else by `wanted`, its `option`.

    Raises RefusedRequest for an unknown format, a missing schema, or a function that is not among the tools.

    Example:
        >>> form_of({}, {"type": "json_object"}, "response_format", ()).schema
        {'type': 'object'}
    """
    kind, name = _choice_of(body.get("tool_choice"))
    if kind in _FORCED:
        names = [tool["function"]["name"] for tool in tools]
        if kind in ("function", "tool") and name not in names:
            raise RefusedRequest(f"tool_choice must name one of the tools {names}, got {name!r:.80}.")
        return AnswerForm(option="tool_choice", schema=None, function=name or "")
    kind = wanted.get("type", "text")
    if kind == "json_object":
        return AnswerForm(option=option, schema={"type": "object"})
    if kind == "json_schema":
        described = entry_of(wanted, "json_schema", dict, where=f"{option}.", default=wanted)
        schema = entry_of(described, "schema", dict, where=f"{option}.")
        if schema is None:
            raise RefusedRequest(f"{option}.schema is missing.")
        return AnswerForm(option=option, schema=schema, is_required=True)
    if kind != "text":
        raise RefusedRequest(f"{option} must be of type text, json_object or json_schema, got {kind!r:.80}.")
    return None
