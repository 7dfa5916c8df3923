"""`Tool`: a function or class that the model may call."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from llmrl._utils.failure import guarded
from llmrl._utils.imports import require
from llmrl._utils.threads import run_in_thread
from llmrl._utils.types import Row
from llmrl.data import ToolSchema

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

logger = logging.getLogger(__name__)


class ToolError(Exception):
    """Raise it in a tool to fail the call, with a message for the model."""

    outcome = "failed"
    """Outcome under which the call is counted."""


class InvalidArguments(ToolError):
    """The model's arguments do not match the tool."""

    outcome = "invalid"


class StopSignal(Exception):
    """Raise it in a tool to end the conversation after this turn; its text is recorded as the reason."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str
    parameters: Mapping[str, object]
    """JSON schema of the arguments, an object."""
    run: Callable[[dict[str, object], str], Awaitable[object]]
    """Called with the arguments and the conversation's id; returns the answer."""
    release: Callable[[str], Future[None] | None] | None = None
    """Called with the id of a conversation that has ended (`Release`)."""
    open: Callable[[str, Row], Coroutine[None, None, object]] | None = None
    """Called with a conversation's id and dataset row before its first call; returns the tool's state."""
    state_name: str = ""
    """Name by which rewards read the state."""
    keeps_time: bool = False
    """Whether the tool limits its own time and never blocks; it then runs on the caller's loop."""
    keeps_opening_time: bool = False
    """Whether `open` limits its own time, as a sandbox's start does, which may build an image."""

    @property
    def schema(self) -> ToolSchema:
        """Schema for chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def function_tool(function: Callable[..., object], *, name: str | None = None) -> Tool:
    """Return a tool with the schema of a function's type hints and the description of its docstring.

    Arguments are validated and converted to the hinted types. A sync function runs in its own thread.

    Raises:
        TypeError: if a parameter has no type hint, or the function has no docstring.
        MissingExtraError: if the `tools` extra is not installed.

    Example:
        >>> def add(a: int, b: int = 1) -> int:
        ...     '''Add two numbers.
        ...
        ...     Args:
        ...         a: the first number.
        ...         b: the second.
        ...     '''
        ...     return a + b
        >>> function_tool(add).parameters["properties"]["a"]
        {'description': 'the first number.', 'type': 'integer'}
        >>> asyncio.run(function_tool(add).run({"a": 2}, ""))
        3
    """
    signature = Signature(function)

    async def run(arguments: dict[str, object], conversation_id: str) -> object:
        return await call(function, signature.validate(arguments))

    return Tool(name or function.__name__, signature.description, signature.schema, run)


class InstanceTools:
    """Tools with state: the public methods of a class, with one instance per conversation.

    The instance is created before the first answer of the conversation is processed. `reset`, if defined, is then
    called with the columns of the dataset row that it names, and `close` at the end of the conversation, after scoring.
    Rewards read the instance by the class's name: `class ShoppingBasket` as `shopping_basket`.

    Args:
        cls: the class; `reset`, `close` and `get_reward` are not tools.
        make: function that returns an instance; `cls` by default.

    Raises TypeError if the class has no public method, or a method has no docstring or type hints.

    Example:
        >>> class Notes:
        ...     def __init__(self):
        ...         self.lines = []
        ...     def note(self, line: str) -> int:
        ...         '''Write a line down; the answer is how many there are.'''
        ...         self.lines.append(line)
        ...         return len(self.lines)
        >>> [tool] = InstanceTools(Notes).tools
        >>> [asyncio.run(tool.run({"line": "a"}, name)) for name in ("first", "first", "second")]
        [1, 2, 1]
    """

    def __init__(self, cls: type, make: Callable[[], Any] | None = None) -> None:
        functions = {
            name: function
            for name, function in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_") and name not in ("close", "get_reward", "reset")
        }
        if not functions:
            raise TypeError(f"{cls.__name__} has no public method that could be a tool.")
        self.state_name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()
        """Name by which rewards read the instance."""
        self._make = make or cls
        self._instances: dict[str, tuple[Any, asyncio.AbstractEventLoop]] = {}
        self.tools = [self._tool(cls, name, function) for name, function in functions.items()]

    def _tool(self, cls: type, name: str, function: Callable[..., object]) -> Tool:
        is_static = isinstance(inspect.getattr_static(cls, name), staticmethod)
        signature = Signature(function, is_method=not is_static)

        async def run(arguments: dict[str, object], conversation_id: str) -> object:
            valid = signature.validate(arguments)
            if conversation_id not in self._instances:
                await self.open(conversation_id, {})
            instance, _ = self._instances[conversation_id]
            return await call(getattr(instance, name), valid)

        async def open_instance(conversation_id: str, row: Row) -> object:
            return (await self.open(conversation_id, row))[0]

        described = signature.description, signature.schema
        return Tool(name, *described, run, self.release, open_instance, self.state_name)

    async def open(self, conversation_id: str, row: Row) -> tuple[object, object]:
        """Create a conversation's instance, and return it with the result of its `reset`."""
        instance = self._make()
        self._instances[conversation_id] = (instance, asyncio.get_running_loop())
        reset = getattr(instance, "reset", None)
        if reset is None:
            return instance, None
        parameters = inspect.signature(reset).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = [parameter.name for parameter in parameters]
        given = {name: value for name, value in row.items() if takes_all or name in names}
        return instance, await call(reset, given)

    def release(self, conversation_id: str) -> Future[None] | None:
        """Close a conversation's instance, on its loop if `close` is async. May be called twice."""
        instance, loop = self._instances.pop(conversation_id, (None, None))
        closing = getattr(instance, "close", lambda: None)()
        if loop is None or not inspect.iscoroutine(closing):
            return None
        return asyncio.run_coroutine_threadsafe(_told(closing), loop)


def text_parameters(name: str, description: str) -> dict[str, object]:
    """Return the schema of arguments that are one text."""
    text = {"type": "string", "description": description}
    return {"type": "object", "properties": {name: text}, "required": [name]}


def only_text(arguments: Mapping[str, object], name: str) -> str:
    """Return the text `name`. Raises InvalidArguments unless it is the only argument."""
    text = arguments.get(name)
    if set(arguments) != {name} or not isinstance(text, str):
        raise InvalidArguments(f"the only argument is {name!r} (a string), got {sorted(arguments)}")
    return text


def collect_tools(tools: Iterable[object]) -> list[Tool]:
    """Return tools, functions and classes as `Tool`s. Raises TypeError, or ValueError for equal names."""
    collected: list[Tool] = []
    for tool in tools:
        if isinstance(tool, Tool):
            collected.append(tool)
        elif isinstance(tool, type):
            collected.extend(InstanceTools(tool).tools)
        elif callable(tool):
            collected.append(function_tool(tool))
        else:
            raise TypeError(f"tools must be functions, classes or Tools, got {type(tool).__name__}.")
    names = [tool.name for tool in collected]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two tools are named {name!r}; names must differ.")
    return collected


class Signature:
    """A function's schema and documentation. Raises TypeError if one of them is missing."""

    def __init__(self, function: Callable[..., object], *, is_method: bool = False) -> None:
        pydantic = require("pydantic", extra="tools")
        name = getattr(function, "__name__", type(function).__name__)
        documentation = require("docstring_parser", extra="tools").parse(inspect.getdoc(function) or "")
        parts = (documentation.short_description, documentation.long_description)
        self.description = "\n\n".join(part for part in parts if part)
        if not self.description:
            raise TypeError(f"tool {name!r} has no docstring, which the model reads as its description.")
        described = {parameter.arg_name: parameter.description for parameter in documentation.params}
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, tuple[object, FieldInfo]] = {}
        parameters = list(inspect.signature(function).parameters.values())[int(is_method) :]  # without self
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise TypeError(f"tool {name!r} has the parameter {parameter}; tools take named parameters only.")
            if parameter.name not in hints:
                raise TypeError(
                    f"parameter {parameter.name!r} of tool {name!r} has no type hint; its schema needs one."
                )
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (
                hints[parameter.name],
                pydantic.Field(default, description=described.get(parameter.name)),
            )
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
        self._model = pydantic.create_model(f"arguments of {name}", __config__=config, **fields)
        self._invalid = pydantic.ValidationError
        self.schema = _without_titles(self._model.model_json_schema())

    def validate(self, arguments: dict[str, object]) -> dict[str, object]:
        """Return the arguments with the parameters' types. Raises InvalidArguments with all reasons."""
        try:
            valid = self._model.model_validate(arguments)
        except self._invalid as error:
            raise InvalidArguments("; ".join(map(self._explain, error.errors()))) from None
        return {name: getattr(valid, name) for name in self._model.model_fields if name in valid.model_fields_set}

    def _explain(self, error: ErrorDetails) -> str:
        where = ".".join(map(str, error["loc"]))
        if error["type"] == "extra_forbidden":
            return f"there is no argument {where!r}; the arguments are {list(self._model.model_fields)}"
        if error["type"] == "missing":
            return f"argument {where!r} is missing"
        return f"argument {where!r}: {error['msg'][:1].lower()}{error['msg'][1:]}, got {error['input']!r:.200}"


def _without_titles(schema: Any) -> Any:
    """Remove titles, which repeat names and cost tokens, but keep properties named `title`."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(part) for name, part in value.items()}
        if key in ("properties", "$defs") and isinstance(value, dict)
        else _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }


async def _told(closing: Awaitable[object]) -> None:
    try:
        await guarded(closing)
    except Exception as error:
        logger.warning("a tool failed to close its resources for a conversation", exc_info=error)


async def call(function: Callable[..., object], arguments: dict[str, object]) -> object:
    """Call a function with named arguments; a sync function runs in its own thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await run_in_thread(function, **arguments)
