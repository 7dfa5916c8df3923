"""Conversations in OpenAI's format, as people log them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from llmrl._utils.types import Row
from llmrl.data.message import Message


def read_chat_log(row: Row) -> Row:
    """Return a logged conversation as a row with `messages`, of text and with read arguments, and its other columns.

    The log has `messages` and optionally `tools`, or a `request` with them and the `response` to it, of which the first
    choice is read. Role `developer` is `system`; parts of text are joined.

    Raises ValueError if it has no messages, or if a tool call is malformed.

    Example:
        >>> row = read_chat_log({"request": {"model": "m", "messages": [{"role": "developer", "content": "Add."}]},
        ...                      "response": {"choices": [{"message": {"role": "assistant", "content": "3"}}]}})
        >>> row["messages"]
        [{'role': 'system', 'content': 'Add.'}, {'role': 'assistant', 'content': '3'}]
    """
    columns = {name: value for name, value in row.items() if name not in ("request", "response")}
    messages = row.get("messages")
    request = row.get("request")
    if messages is None and isinstance(request, Mapping):
        messages = [*(request.get("messages") or ()), *_answer(row.get("response"))]
        columns |= {"tools": request["tools"]} if request.get("tools") else {}
    if messages is None:
        raise ValueError(f"it has no 'messages', nor a 'request' with them, only {sorted(map(str, row))}.")
    if isinstance(messages, Sequence) and not isinstance(messages, str):
        messages = [_read(message) for message in messages]
    return {**columns, "messages": messages}


def _answer(response: object) -> list[Message]:
    """Return the message of a response's first choice."""
    choices = response.get("choices") if isinstance(response, Mapping) else None
    first = choices[0] if isinstance(choices, Sequence) and choices else None
    message = first.get("message") if isinstance(first, Mapping) else None
    if not isinstance(message, Mapping):
        raise ValueError(f"its 'response' has no choices[0].message, got {response!r:.200}.")
    return [dict(message)]


def _read(message: Message) -> Message:
    if not isinstance(message, Mapping):
        return message
    read = dict(message)
    if read.get("role") == "developer":
        read["role"] = "system"
    content = read.get("content")
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        read["content"] = "".join(part["text"] for part in content)
    if calls := read.pop("tool_calls", None):
        read["tool_calls"] = [_with_arguments(call) for call in calls]
    return read


def _with_arguments(call: object) -> Message:
    """Return a tool call with arguments that are a dict, not a JSON string."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"a tool call must be {{'function': {{'name', 'arguments'}}}}, got {call!r:.200}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f"the arguments of a call of {function['name']!r} are not JSON: {error}.") from error
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of a call of {function['name']!r} must be a dict, got {arguments!r:.200}.")
    return {**call, "type": "function", "function": {**function, "arguments": dict(arguments)}}


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
    return {**message, "content": message.get("content") or None, "tool_calls": calls}
