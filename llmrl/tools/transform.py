"""`ToolTransform`: answers the model's tool calls."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, get_args

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments, check_choice, check_positive, did_you_mean
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.failure import describe
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl._utils.spans import span
from llmrl.data import History, MalformedToolCall, Message, StopReason, ToolSchema, text_of
from llmrl.data.chats import flatten
from llmrl.data.message import copied, encodable
from llmrl.data.tensordicts import batch_elements, dataset_columns, non_tensor, plain, restacked
from llmrl.rendering.tool_calls import find_tool_call_parser
from llmrl.tools.output import ToolResult, TruncateSide, as_text, truncate
from llmrl.tools.rate_limit import RateLimiter
from llmrl.tools.session import STATE_KEY, ToolSession, session_of, set_session
from llmrl.tools.tool import InvalidArguments, StopSignal, Tool, ToolError, collect_tools

Call = Mapping[str, Any]
"""Entry of a message's `tool_calls`."""


class OutputOptions(TypedDict, total=False):
    """Options for reading calls and cutting answers (`ToolTransform`)."""

    tool_parser: str
    max_output_chars: int
    truncate_side: TruncateSide


class ToolTransform(KnownArguments, Transform):
    """Answers tool calls of assistant messages with tool messages, and adds the tools to the prompt.

    Tools are functions, classes with one instance per conversation (`InstanceTools`), or `Tool`s. Calls of a message
    run in parallel, except those of one instance; answers are in the order of the calls. Errors (an
    unknown tool, invalid arguments, an exception, a timeout) are reported to the model and counted,
    and do not end the rollout. Calls in an answer cut by the length limit are ignored.

    The policy's renderer reads the calls in the format of the chat template; `tool_parser` reads them in histories from
    elsewhere. The schemas are written to `"tools"` at the root, where policies read them.

    Args:
        tools: functions, classes and `Tool`s.
        tool_name: role of the answers.
        tool_parser: name, in `TOOL_CALL_PARSERS`, of the parser for messages without parsed calls.
        timeout: seconds per call, and for the start of a class's instance, except for sandboxes.
        max_parallel_calls: concurrent calls per message.
        max_output_chars: length at which an answer is cut, with a mark.
        truncate_side: which part is cut: `start`, `middle` or `end`.
        rate_limits: limits by tool name; the timeout starts after waiting for them.

    Raises TypeError or ValueError if a tool is unsuitable, or an argument is out of range.

    Example:
        >>> from tensordict import TensorDict
        >>> from llmrl.data import ChatHistory
        >>> from llmrl.envs import ChatEnv
        >>> def add(a: int, b: int) -> int:
        ...     '''Add two numbers.'''
        ...     return a + b
        >>> env = ChatEnv().append_transform(ToolTransform([add], tool_parser="hermes"))
        >>> data = env.reset(TensorDict({"query": "7 + 8 ="}))
        >>> call = '<tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>'
        >>> full = data["history"].prompt.append({"role": "assistant", "content": call})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> env.step(data)["next", "history"].prompt.chats[-1]
        {'role': 'tool', 'content': '15', 'name': 'add'}
    """

    def __init__(
        self,
        tools: Sequence[object] = (),
        *,
        tool_name: str = "tool",
        tool_parser: str = "none",
        timeout: float = 30.0,
        max_parallel_calls: int = 8,
        max_output_chars: int = 8000,
        truncate_side: TruncateSide = "middle",
        rate_limits: Mapping[str, RateLimiter] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(tools, Iterable) or isinstance(tools, str):
            raise TypeError(f"tools must be a list of tools, got {tools!r:.80}; write ToolTransform([tool]).")
        check_positive(timeout=timeout, max_parallel_calls=max_parallel_calls, max_output_chars=max_output_chars)
        check_choice(get_args(TruncateSide), truncate_side=truncate_side)
        self.tool_role = tool_name
        self._parse = find_tool_call_parser(tool_parser)
        self.timeout = timeout
        self.max_parallel_calls = max_parallel_calls
        self.max_output_chars = max_output_chars
        self.truncate_side = truncate_side
        self.rate_limits = dict(rate_limits or {})
        self.counts: Counter[str] = Counter()
        """Number of `calls` and `failures`; of `unknown`, `invalid`, `malformed` and `timeouts` among the failures."""
        self._loops = ReplaceableLoop("llmrl-tools")
        self._sessions: weakref.WeakSet[ToolSession] = weakref.WeakSet()
        self._home: BackgroundLoop | None = None  # for tools bound to one loop, such as connections
        self._given = tuple(tools)
        self._set_tools(collect_tools(tools))
        if unknown := sorted(set(self.rate_limits) - set(self.tools)):
            raise ValueError(f"rate_limits has {unknown}, but the names of the tools are {sorted(self.tools)}.")

    def __getstate__(self) -> dict[str, object]:
        # A copy creates its own tools: loops, threads and instances cannot be copied.
        made = ("_loops", "_sessions", "tools", "_schemas")
        return {name: value for name, value in super().__getstate__().items() if name not in made}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._loops = ReplaceableLoop("llmrl-tools")
        self._sessions = weakref.WeakSet()
        self._set_tools(self._make_tools())

    def _make_tools(self) -> list[Tool]:
        return collect_tools(self._given)

    def _set_tools(self, tools: Sequence[Tool]) -> None:
        releases: dict[str, object] = {}  # those of one instance's tools are equal
        for tool in tools:
            if tool.state_name and releases.setdefault(tool.state_name, tool.release) != tool.release:
                raise ValueError(
                    f"two classes or servers keep their state under the name {tool.state_name!r}, by which rewards "
                    "read it; rename one of them."
                )
        self.tools: dict[str, Tool] = {tool.name: tool for tool in tools}
        self._schemas: tuple[ToolSchema, ...] = tuple(tool.schema for tool in tools)

    @property
    def loop(self) -> BackgroundLoop:
        """The event loop of the tools, or its replacement while it is blocked."""
        return self._home or self._loops.current

    @property
    def state_names(self) -> set[str]:
        """Names by which rewards read the state of tools."""
        return {tool.state_name for tool in self.tools.values() if tool.state_name}

    def close(self) -> None:
        """Release open conversations, and close the tools' loops. May be called twice."""
        for session in list(self._sessions):
            session.release()
        self._loops.close()

    # The environment's side

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(tensordict_reset)
        for element in elements:
            session = session_of(element)
            if session is None:
                session = ToolSession()
                set_session(element, session)
            self._join(session)
            known = tuple(plain(element.get("tools", None)) or ())
            element.set("tools", non_tensor(known + self._schemas))
        return restacked(elements, tensordict_reset.batch_size)

    def _join(self, session: ToolSession) -> None:
        self._sessions.add(session)
        session.tool_names |= set(self.tools)
        for release in {tool.release for tool in self.tools.values() if tool.release is not None}:
            session.on_release(release)

    async def before_step(self, element: TensorDictBase) -> None:
        """Answer one conversation's last message before the batched step: its tools may take long."""
        session = session_of(element)
        if session is not None:
            answers = await self._answer(element, session)
            session.put_answers(_turn(element), id(self), answers)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(tensordict)
        next_elements = batch_elements(next_tensordict)
        sessions = [session_of(element) or ToolSession() for element in elements]
        answers: list[list[Message] | None] = [
            session.take_answers(_turn(element), id(self)) for element, session in zip(elements, sessions, strict=True)
        ]
        waiting = [index for index, messages in enumerate(answers) if messages is None]

        async def answer_waiting() -> list[list[Message]]:
            return await asyncio.gather(*(self._answer(elements[index], sessions[index]) for index in waiting))

        if waiting:
            for index, answer in zip(waiting, run_sync(answer_waiting()), strict=True):
                answers[index] = answer
        for element, next_element, session, messages in zip(elements, next_elements, sessions, answers, strict=True):
            if messages:
                prompt = next_element.get(("history", "prompt"))
                next_element.set(("history", "prompt"), self._with_answers(prompt, messages, _turn(element), session))
            if session.is_stopped:
                for key in ("terminated", "done"):
                    next_element.set(key, torch.ones(1, dtype=torch.bool))
            set_session(next_element, session)
            if "tools" in element:
                next_element.set("tools", element.get("tools"))
        return restacked(next_elements, next_tensordict.batch_size)

    def _with_answers(self, prompt: History, answers: list[Message], turn: int, session: ToolSession) -> History:
        """Return the prompt with all answers in the order of their calls: few templates name an answer's call.

        The answers of other transforms to the same message are in the prompt already.
        """

        def placed(messages: Sequence[Message], default: int) -> list[tuple[int, Message]]:
            places = map(session.place_of, messages)
            return [(default if place is None else place, one) for place, one in zip(places, messages, strict=True)]

        [chat] = flatten(prompt.chats)
        end = turn
        while end < len(chat) and (chat[end]["role"] == self.tool_role or session.place_of(chat[end]) is not None):
            end += 1
        pairs = [*placed(chat[turn:end], -1), *placed(answers, sys.maxsize)]
        told = [one for _, one in sorted(pairs, key=lambda pair: pair[0])]
        return History.from_chats((*chat[:turn], *told, *chat[end:]), check=False)

    def release(self, element: TensorDictBase) -> None:
        """Release what tools keep for a conversation that has ended."""
        session = session_of(element)
        if session is not None:
            session.release()

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the tools and the session."""
        shape = tuple(observation_spec.shape)
        observation_spec["tools"] = NonTensor(shape=shape, example_data=())
        session = NonTensor(shape=shape, example_data=None)
        observation_spec[STATE_KEY] = Composite({"session": session}, shape=shape)
        return observation_spec

    # The model's side

    async def _answer(self, element: TensorDictBase, session: ToolSession) -> list[Message]:
        await self._open(element, session)
        messages = element.get(("history", "full")).chats
        reason = plain(element.get(("rollout", "reason"), ""))
        is_cut = reason in (StopReason.LENGTH, StopReason.ABORTED)
        if is_cut or not messages or messages[-1]["role"] != "assistant":
            return []
        malformed: Sequence[MalformedToolCall] = ()
        conversation = plain(element.get("conversation", None))
        if conversation is not None and conversation.last is not None:
            malformed = conversation.last.malformed_tool_calls
        return await self.answer(messages[-1], malformed, session, turn=len(messages))

    async def _open(self, element: TensorDictBase, session: ToolSession) -> None:
        """Create the state of a conversation's tools. Errors are raised: the model did not cause them."""
        row = dataset_columns(element)
        for tool in self.tools.values():
            if tool.open is not None and tool.state_name not in session.states:
                try:
                    async with asyncio.timeout(None if tool.keeps_opening_time else self.timeout) as limit:
                        opening = tool.open(session.id, copied(row))
                        session.states[tool.state_name] = await self._loops.wait(opening, on=self._home)
                except TimeoutError as error:
                    if not limit.expired():
                        raise
                    raise TimeoutError(
                        f"{tool.state_name} did not begin within {self.timeout:g} s; if it needs longer, such as to "
                        "build a container, increase the timeout of its tools."
                    ) from error

    async def answer(
        self, message: Message, malformed: Sequence[MalformedToolCall], session: ToolSession, *, turn: int
    ) -> list[Message]:
        """Return the tool messages for an assistant message in the order of its calls; never raises.

        Args:
            malformed: calls in it that could not be parsed.
            turn: number of messages, which identifies the turn.
        """
        calls: Sequence[Call] = message.get("tool_calls") or ()
        if not calls and not malformed:
            parsed = self._parse(text_of(message.get("content")), self._schemas)
            calls = parsed.tool_calls
            malformed = parsed.malformed
        places = asyncio.Semaphore(self.max_parallel_calls)
        queues: dict[object, list[tuple[int, Call]]] = {}
        for index, call in enumerate(calls):
            name = call["function"]["name"]
            tool = self.tools.get(name)
            belongs_to_other = tool is None and name in session.tool_names
            if not belongs_to_other and session.claim(turn, index):
                queue = (tool and tool.state_name) or index  # one instance's calls run in order
                queues.setdefault(queue, []).append((index, call))

        async def answer_all(queue: list[tuple[int, Call]]) -> list[tuple[int, Message]]:
            return [(index, await self._answer_call(call, session, places)) for index, call in queue]

        answered = await asyncio.gather(*map(answer_all, queues.values()))
        placed = sorted(itertools.chain(*answered), key=lambda pair: pair[0])
        for index, bad in enumerate(malformed):
            if session.claim(turn, ("malformed", index)):
                self.count("malformed", session)
                message = self.tool_message(f"Error: the tool call cannot be read: {bad.reason}")
                placed.append((len(calls) + index, message))
        for place, message in placed:
            session.put_place(message, place)
        return [message for _, message in placed]

    async def _answer_call(self, call: Call, session: ToolSession, places: asyncio.Semaphore) -> Message:
        function = call["function"]
        async with places:
            text = await self.call(function["name"], function.get("arguments") or {}, session)
        return self.tool_message(text, name=function["name"], tool_call_id=call.get("id"))

    async def call(self, name: str, arguments: object, session: ToolSession) -> str:
        """Run one call and return its answer; never raises."""
        tool = self.tools.get(name)
        if tool is None:
            return self._unknown(name, session)
        with span("execute_tool", name) as current:
            async with self.rate_limits[name].slot() if name in self.rate_limits else contextlib.nullcontext():
                outcome, text = await self._outcome_of(tool, arguments, session)
            if current is not None:
                current.set_attributes({"gen_ai.tool.name": name, "gen_ai.tool.type": "function"})
                if outcome != "answered":
                    current.set_attribute("error.type", outcome)
        self.count(outcome, session)
        return text

    async def _outcome_of(self, tool: Tool, arguments: object, session: ToolSession) -> tuple[str, str]:
        """Return a call's outcome (`OUTCOMES`) and its answer."""
        name = tool.name
        try:
            if not isinstance(arguments, dict):
                raise InvalidArguments(f"the arguments must be an object, got {arguments!r:.200}")
            async with asyncio.timeout(None if tool.keeps_time else self.timeout) as limit:
                run = _run(tool, copied(arguments), session.id)
                return await (run if tool.keeps_time else self._loops.wait(run, on=self._home))
        except TimeoutError as error:
            reason = f"it took more than {self.timeout:g} s" if limit.expired() else str(error) or "it timed out"
            return "timeouts", f"Error: {name} was stopped: {reason}."
        except StopSignal as stop:
            session.is_stopped = True
            return "answered", f"[stop] {stop}"
        except InvalidArguments as error:
            return error.outcome, f"Error: wrong arguments for {name}: {error}."
        except ToolError as error:
            return error.outcome, f"Error: {error}"
        except Exception as error:
            return "failed", f"Error: {name} failed with {describe(error)}"

    def _unknown(self, name: str, session: ToolSession) -> str:
        self.count("unknown", session)
        names = sorted(session.tool_names | set(self.tools))
        meant = did_you_mean(name, names)
        return f"Error: there is no tool {name!r:.100}.{meant} The tools are: {', '.join(names) or 'none'}."

    def count(self, outcome: str, session: ToolSession) -> None:
        """Count a call by its outcome (`OUTCOMES`)."""
        session.outcomes[outcome] += 1
        self.counts["calls"] += 1
        if outcome != "answered":
            self.counts["failures"] += 1
        if outcome not in ("answered", "failed"):
            self.counts[outcome] += 1

    def tool_message(self, text: str, *, name: str | None = None, tool_call_id: str | None = None) -> Message:
        """Return an answer as a message, cut to the limit and encodable by any tokenizer."""
        content = truncate(encodable(text), self.max_output_chars, self.truncate_side)
        message: dict[str, object] = {"role": self.tool_role, "content": content}
        if name is not None:
            message["name"] = encodable(name)
        if tool_call_id is not None:
            message["tool_call_id"] = tool_call_id
        return message


async def _run(tool: Tool, arguments: dict[str, object], conversation_id: str) -> tuple[str, str]:
    value = await tool.run(arguments, conversation_id)
    return "failed" if isinstance(value, ToolResult) and value.is_error else "answered", as_text(value)


def _turn(element: TensorDictBase) -> int:
    return len(element.get(("history", "full")).chats)
