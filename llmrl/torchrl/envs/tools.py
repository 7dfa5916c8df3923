"""TorchRL's tool interface: a registry, two call formats, and transforms that run calls sequentially."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, cast

from llmrl._utils.arguments import check_positive
from llmrl._utils.failure import describe
from llmrl._utils.threads import run_in_thread
from llmrl.data import MalformedToolCall, Message, text_of
from llmrl.tools.output import as_text
from llmrl.tools.session import ToolSession
from llmrl.tools.transform import ToolTransform

_BLOCK = re.compile(r'<tool\s+name="([^"]+)"(?:\s+tag="([^"]+)")?\s*>\s*(.*?)\s*</tool>', re.DOTALL)


class ToolService(Protocol):
    """A tool, called with keyword arguments, which may include `_state`."""

    name: str

    def __call__(self, **arguments: object) -> object:
        """Return the result for the model."""
        ...


@dataclass
class ToolCall:
    """A parsed tool call."""

    tool: str
    args: dict[str, object] | str
    """Arguments, or JSON that has not been decoded."""
    tag: str | None = None


class ParseResult(TypedDict):
    """A parser's output: the text without the calls, and the calls."""

    text: str
    calls: list[ToolCall]
    meta: dict[str, int]


class ToolRegistry:
    """Tools by name."""

    def __init__(self, services: Sequence[ToolService] = ()) -> None:
        self._services: dict[str, Callable[..., object]] = {service.name: service for service in services}

    def register(self, service: ToolService) -> None:
        """Add a tool, replacing any tool of the same name."""
        self._services[service.name] = service

    def get(self, name: str) -> Callable[..., object]:
        """Return a tool; raise KeyError if the name is unknown."""
        if name not in self._services:
            raise KeyError(f"Unknown tool: {name}")
        return self._services[name]

    def __contains__(self, name: str) -> bool:
        return name in self._services


class XMLBlockParser:
    """Parses calls `<tool name="add" tag="A">{"a": 1}</tool>`; other bodies than JSON objects become argument `raw`.

    Example:
        >>> XMLBlockParser()('Let me see. <tool name="add">{"a": 1}</tool>')
        {'text': 'Let me see.', 'calls': [ToolCall(tool='add', args={'a': 1}, tag=None)], 'meta': {'count': 1}}
    """

    def __call__(self, response: str | Mapping[str, object]) -> ParseResult:
        """Return the text without its calls, and the calls."""
        if not isinstance(response, str):
            response = str(response.get("text", ""))
        blocks = map(re.Match.groups, _BLOCK.finditer(response))
        calls = [ToolCall(name, _arguments(body), tag) for name, tag, body in blocks]
        return _parsed(_BLOCK.sub("", response).strip(), calls)


class JSONCallParser:
    """Parses calls in a mapping, or in its JSON: `{"message": "...", "tools": [{"tool": "add", "args": {"a": 1}}]}`.

    Example:
        >>> JSONCallParser()('{"message": "Hi", "tools": []}')
        {'text': 'Hi', 'calls': [], 'meta': {'count': 0}}
    """

    def __call__(self, response: str | Mapping[str, object]) -> ParseResult:
        """Return the message and its calls; a text that is not a JSON object is a message without calls."""
        if isinstance(response, str):
            try:
                decoded = json.loads(response)
            except (ValueError, RecursionError):  # such as numbers of too many digits, and deep nesting
                decoded = None
            if not isinstance(decoded, dict):
                return _parsed(response, [])
            response = decoded
        calls = cast("list[dict[str, object]]", response.get("tools") or [])
        return _parsed(str(response.get("message") or ""), [ToolCall(**call) for call in calls])  # type: ignore[arg-type]


class ExecuteToolsInOrder(ToolTransform):
    """Runs the calls of a message sequentially and answers all of them in one message.

    Unlike `ToolTransform`, it neither validates arguments nor shows tools to the model. Errors are
    reported to the model and do not end the rollout.

    Args:
        registry: the tools.
        parser: function that returns the calls of a message, such as an `XMLBlockParser` or a `JSONCallParser`.
        stop_on_error: whether to skip the calls after a failed one.
        pass_state_to_tools: whether to pass `_state`, a dict of the conversation, to each tool.

    Example:
        >>> transform = ExecuteToolsInOrder(ToolRegistry(), XMLBlockParser())
        >>> message = {"role": "assistant", "content": '<tool name="add">{}</tool>'}
        >>> asyncio.run(transform.answer(message, (), ToolSession(), turn=2))[0]["content"]
        "add failed: KeyError: 'Unknown tool: add'"
    """

    _as_text: Callable[[object], str] = staticmethod(as_text)

    def __init__(
        self,
        registry: ToolRegistry,
        parser: Callable[[str], ParseResult],
        stop_on_error: bool = False,
        pass_state_to_tools: bool = True,
    ) -> None:
        super().__init__()
        self.registry = registry
        self.parser = parser
        self.stop_on_error = stop_on_error
        self.pass_state_to_tools = pass_state_to_tools

    async def answer(
        self, message: Message, malformed: Sequence[MalformedToolCall], session: ToolSession, *, turn: int
    ) -> list[Message]:
        """Return one message for all calls, or an empty list without calls. Never raises."""
        if not session.claim(turn, "in order"):
            return []
        try:
            calls = self.parser(text_of(message.get("content")))["calls"]
        except Exception as error:
            self.count("malformed", session)
            return [self.tool_message(f"Error: the tool calls cannot be parsed: {describe(error)}")]
        lines = []
        for call in calls:
            is_done, text = await self._result(call, session)
            self.count("answered" if is_done else "failed", session)
            tag = f" [tag: {call.tag}]" if call.tag else ""
            lines.append(f"{call.tool}{tag} {'succeeded' if is_done else 'failed'}: {text}")
            if self.stop_on_error and not is_done:
                break
        return self._messages(lines) if lines else []

    def _messages(self, lines: Sequence[str]) -> list[Message]:
        return [self.tool_message("\n".join(lines))]

    async def _result(self, call: ToolCall, session: ToolSession) -> tuple[bool, str]:
        try:
            service = self.registry.get(call.tool)
            arguments = _decoded(call.args)
            if self.pass_state_to_tools:
                arguments = {**arguments, "_state": session.states}
            async with asyncio.timeout(self.timeout) as limit:
                return True, self._as_text(await self._loops.wait(run_in_thread(service, **arguments)))
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():  # not a time limit of the tool's own
                return False, f"it took more than {self.timeout:g} s"
            return False, describe(error)


class SimpleToolTransform(ExecuteToolsInOrder):
    r"""Runs functions by name sequentially and answers each call in its own message.

    Args:
        tools: functions by name.
        tool_schemas: schemas of the tools, which are not shown to the model.
        parser: function that returns the calls of a message; the default uses `tool_call_pattern`.
        tool_call_pattern: regular expression with two groups, a tool's name and its arguments as JSON.
        tool_name: role of the answers.
        timeout: time limit of one call, in seconds.

    Raises ValueError if the pattern has not two groups, or the time limit is not positive.

    Example:
        >>> transform = SimpleToolTransform({"add": lambda a, b: {"sum": a + b}})
        >>> message = {"role": "assistant", "content": '<tool>add\n{"a": 7, "b": 8}</tool>'}
        >>> asyncio.run(transform.answer(message, (), ToolSession(), turn=2))[0]["content"]
        "add succeeded: {'sum': 15}"
    """

    _as_text = staticmethod(str)

    def __init__(
        self,
        tools: Mapping[str, Callable[..., object]],
        tool_schemas: Mapping[str, Mapping[str, object]] | None = None,
        parser: Callable[[str], ParseResult] | None = None,
        tool_call_pattern: str | None = None,
        tool_name: str = "tool",
        timeout: float = 10.0,
    ) -> None:
        check_positive(timeout=timeout)
        registry = ToolRegistry()
        registry._services = dict(tools)
        pattern = re.compile(
            r"<tool>(.*?)\n(.*?)</tool>" if tool_call_pattern is None else tool_call_pattern, re.DOTALL
        )
        if pattern.groups != 2:
            raise ValueError(
                "tool_call_pattern must have two groups, the tool's name and its arguments as JSON; "
                f"{pattern.pattern!r} has {pattern.groups}."
            )
        super().__init__(registry, parser or functools.partial(_read, pattern), pass_state_to_tools=False)
        self.tool_role = tool_name
        self.timeout = timeout
        self.tool_schemas = dict(tool_schemas or {})

    def _messages(self, lines: Sequence[str]) -> list[Message]:
        return [self.tool_message(line) for line in lines]


def _read(pattern: re.Pattern[str], text: str) -> ParseResult:
    return _parsed(text, [ToolCall(name, body) for name, body in pattern.findall(text)])


def _decoded(arguments: object) -> dict[str, object]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments.strip() or "{}")
        except ValueError as error:
            raise ValueError(f"Failed to parse tool arguments: {error}") from error
    if not isinstance(arguments, dict):  # JSON from a model may be anything
        raise ValueError(f"the arguments must be an object, got {arguments!r:.200}")
    return arguments


def _arguments(body: str) -> dict[str, object]:
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(body or "{}")
        if isinstance(arguments, dict):
            return arguments
    return {"raw": body}


def _parsed(text: str, calls: list[ToolCall]) -> ParseResult:
    return {"text": text, "calls": calls, "meta": {"count": len(calls)}}
