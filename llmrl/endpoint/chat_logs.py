"""Conversion of logged conversations from and to OpenAI's formats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llmrl._utils.types import Row
from llmrl.data.message import Message, system_messages
from llmrl.endpoint.dialects.reading import OTHER_ROLES, TEXTS, arguments_of, function_of, text_parts, tools_of
from llmrl.endpoint.dialects.responses import messages_of
from llmrl.endpoint.requests import REFERENCES, RefusedRequest
from llmrl.rendering.tool_calls import Json


def read_chat_log(row: Row) -> Row:
    """Return a logged conversation as a row: `messages`, with parsed arguments, and its other columns.

    The log has `messages` and optionally `tools`, or a `request` and its `response`, of the chat completions API (only
    the first choice is read) or the responses API. Role `developer` becomes `system`; text parts are joined.

    Raises ValueError if messages are missing, or a tool call is malformed.

    Example:
        >>> row = read_chat_log({"request": {"model": "m", "messages": [{"role": "developer", "content": "Add."}]},
        ...                      "response": {"choices": [{"message": {"role": "assistant", "content": "3"}}]}})
        >>> row["messages"]
        [{'role': 'system', 'content': 'Add.'}, {'role': 'assistant', 'content': '3'}]
        >>> row = read_chat_log({"request": {"input": "1 + 2 ="}, "response": {"output": [
        ...     {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "3"}]}]}})
        >>> row["messages"]
        [{'role': 'user', 'content': '1 + 2 ='}, {'role': 'assistant', 'content': '3'}]
    """
    columns = {name: value for name, value in row.items() if name not in ("request", "response")}
    request = row.get("request")
    try:
        if row.get("messages") is None and isinstance(request, Mapping):
            read_request = _read_responses if "input" in request else _read_completions
            columns["messages"], tools = read_request(dict(request), row.get("response"))
            if tools:
                columns["tools"] = tools
        messages = columns.get("messages")
        if messages is None:
            raise ValueError(f"it has no 'messages', and no 'request' with them, only {sorted(map(str, row))}.")
        if isinstance(messages, Sequence) and not isinstance(messages, str):
            columns["messages"] = [_read(message, f"messages[{place}]") for place, message in enumerate(messages)]
    except RefusedRequest as refused:
        raise ValueError(refused.message) from refused
    return columns


def _read_completions(request: Row, response: object) -> tuple[list[Json], list[Json]]:
    """Return the messages and the tools."""
    match response:
        case {"choices": [{"message": Mapping() as message}, *_]}:
            functions = [{"type": "function", "function": one} for one in request.get("functions") or ()]
            return [*(request.get("messages") or ()), message], request.get("tools") or functions
    raise ValueError(f"its 'response' has no choices[0].message, got {response!r:.200}.")


def _read_responses(request: Row, response: object) -> tuple[list[Json], list[Json]]:
    """Return the messages and the tools."""
    if not isinstance(response, Mapping) or not isinstance(output := response.get("output"), list):
        raise ValueError(f"its 'response' has no list of 'output' items, got {response!r:.200}.")
    for name in ("previous_response_id", "conversation"):
        if request.get(name) is not None:
            raise ValueError(
                f"its request continues {name}={request[name]!r:.80}, which is not in the row; log the whole input."
            )
    opening = system_messages(request.get("instructions") or None)
    items = request["input"]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    messages = messages_of([*(items or ()), *output])
    if any(REFERENCES in message for message in messages):
        raise ValueError("its input has an item_reference to an item that is not in the row; log the whole input.")
    tools = [function_of(tool, "parameters", where="tools[].") for tool in tools_of(request, "function")]
    return [*opening, *messages], tools


def _read(message: object, where: str) -> object:
    if not isinstance(message, Mapping):
        return message
    # Clients write None for entries that a message does not have.
    read = {name: value for name, value in message.items() if value is not None or name == "content"}
    if isinstance(role := read.get("role"), str):
        read["role"] = OTHER_ROLES.get(role, role)
    if isinstance(reasoning := read.get("reasoning"), str):
        read.setdefault("reasoning_content", reasoning)
    content = read.get("content")
    if content is None and "refusal" in read:
        read["content"] = read.pop("refusal")
    elif isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") in TEXTS for part in content):
        read["content"] = text_parts(content, where=f"{where}.content", kinds=TEXTS)
    calls = read.pop("tool_calls", None)
    if (legacy := read.pop("function_call", None)) and not calls:
        calls = [{"function": legacy}]
    if calls:
        read["tool_calls"] = [_with_arguments(call, where) for call in calls]
    return read


def _with_arguments(call: Json, where: str) -> Message:
    """Return a tool call with its arguments as a dict instead of a JSON string."""
    match call:
        case {"function": {"name": str(name)} as function}:
            arguments = arguments_of(function.get("arguments"), where=f"{where}, arguments of a call of {name!r},")
            return {**call, "type": "function", "function": {**function, "arguments": arguments}}
    raise ValueError(f"a tool call must be {{'function': {{'name', 'arguments'}}}}, got {call!r:.200}.")


def as_openai(messages: Sequence[Message]) -> list[Message]:
    """Return messages in OpenAI's format, in which the arguments of calls are JSON strings.

    Example:
        >>> call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
        >>> as_openai([{"role": "assistant", "content": "", "tool_calls": [call]}])[0]["tool_calls"][0]["function"]
        {'name': 'add', 'arguments': '{"a": 1}'}
    """
    return [_written(message) for message in messages]


def _written(message: Message) -> Message:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    # OpenAI accepts missing content beside calls, but templates that concatenate it fail on None.
    return {**message, "content": message.get("content") or "", "tool_calls": calls}
