"""Player of `worker_program.py` for episodes of a verifiers environment.

`VerifiersEnv` starts it in a virtual environment without llmrl, so this file imports only the
standard library, verifiers and verifiers' dependencies.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from types import ModuleType
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat.chat_completion_message_function_tool_call import Function
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment, taskset_config_type

Fields = dict[str, Any]
"""An object of JSON, or of verifiers' configuration."""

_MAX_ROWS_BYTES = 4 << 20
_MAX_INFO_BYTES = 64 << 10
_CHAT = "llmrl_chat"
_NO_KEY = "LLMRL_NO_KEY"  # a seat's key is part of its URL
_SPLIT_FIELDS = ("split", "dataset_split")


class ChatHarness(Harness[HarnessConfig]):
    """The loop of verifiers' `null` harness (messages and MCP tools), in this process.

    `null` starts a program for each user turn, which takes seconds of CPU.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Send requests until an answer calls no tool; a failed request ends the loop, as it ends `null`'s program."""
        system_prompt, prompt = self.resolve_prompt(data)
        messages: list[Any] = []
        if system_prompt:
            messages.append({"role": "system", "content": system_prompt})
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        elif prompt is not None:
            messages += map(message_to_wire, prompt)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            client = await stack.enter_async_context(_client(endpoint, secret))
            options = {"tools": tools} if tools else {}
            while True:
                try:
                    completion = await client.chat.completions.create(model=ctx.model, messages=messages, **options)
                except Exception:  # verifiers' interception server has recorded the cause
                    return ProgramResult(1, "", traceback.format_exc())
                message = completion.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    return ProgramResult(0, "", "")
                for call in message.tool_calls:
                    assert call.type == "function"  # the endpoint offers no other
                    content = None
                    if tool_interception_url:
                        decision = await gate_tool_call(client._client, tool_interception_url, secret, call)
                        if decision["action"] == "deny":
                            content = decision["message"]
                    if content is None:
                        content = await _called(call.function, dispatch, connections)
                    if isinstance(content, dict):  # a denial is a whole message
                        messages.append(content)
                    else:
                        name = call.function.name
                        messages.append({"role": "tool", "tool_call_id": call.id, "content": content, "name": name})


def _client(endpoint: str, secret: str) -> AsyncOpenAI:
    # The connection is not encrypted, and reading certificates would take 30 ms.
    return AsyncOpenAI(
        base_url=endpoint, api_key=secret, timeout=None, http_client=DefaultAsyncHttpxClient(verify=False, timeout=None)
    )


async def _called(function: Function, dispatch: dict[str, tuple[str, str]], connections: Fields) -> object:
    """Return the result of a call, or the error text that verifiers' `null` program would return."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except json.JSONDecodeError as error:
        return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
    if function.name not in dispatch:
        return f"error: unknown tool {function.name!r}"
    return await call_mcp(connections, dispatch, function.name, arguments)


def register_harness() -> None:
    """Register `ChatHarness` as a plugin of verifiers, which finds plugins by the names of modules."""
    module = ModuleType(_CHAT)
    module.ChatHarness = ChatHarness  # type: ignore[attr-defined]
    module.__all__ = ["ChatHarness"]  # type: ignore[attr-defined]
    sys.modules[_CHAT] = module


def resolved_config(taskset: str, config: Fields, split: str | None) -> vf.EnvConfig:
    """Return the environment's configuration; by default, seats use `ChatHarness` without a sandbox."""
    data: Fields = copy.deepcopy(config)
    data["taskset"] = {**data.get("taskset", {}), "id": taskset}
    if split is not None:
        fields = taskset_config_type(taskset).model_fields
        field = next((name for name in _SPLIT_FIELDS if name in fields), None)
        if field is None and split != "train":  # then all tasks are for training
            raise ValueError(
                f"the taskset {taskset!r} has no splits: its configuration has {sorted(fields)}. Take a part of its "
                'tasks with select=, such as {"include": {"idx": ["100:200"]}}.'
            )
        if field is not None:
            data["taskset"][field] = split
    cls = env_config_type(taskset, data.get("id", ""))
    for name, field_info in cls.model_fields.items():
        seat = field_info.default
        if not isinstance(seat, AgentConfig):
            continue
        given = data[name] = dict(data.get(name) or {})
        if "runtime" not in given and "runtime" not in seat.model_fields_set:
            given["runtime"] = {"type": "subprocess"}
        author = default_harness_id(taskset) if seat.harness is None else seat.harness.id
        if "harness" not in given and author in ("null", "bash") and (seat.harness is None or author == "null"):
            given["harness"] = {"id": _CHAT}
    resolved = cls.model_validate(data)
    for name, seat in [("", resolved), *agent_config_fields(resolved).items()]:
        if seat.retries.max_retries or any(rule.max_retries for rule in seat.retries.rules):
            place = f"{name}.retries" if name else "retries"
            raise ValueError(
                f"{place} must be left at 0: the answers of a failed attempt would be trained with the reward of the "
                "next one. A failed rollout is an error, and its group continues without it."
            )
    return resolved


class Player:
    """One environment, its tasks and its episodes."""

    def __init__(self, taskset: str, config: Fields, select: Fields, split: str | None) -> None:
        self.env = load_environment(resolved_config(taskset, config, split))
        self.tasks = self.env.taskset.select(SelectConfig.model_validate(select))
        self.task_class = type(self.env.taskset).task_type()
        self.data_class = self.task_class.data_type()
        if excluded := [name for name, field in self.data_class.model_fields.items() if field.exclude]:
            raise ValueError(
                f"{self.data_class.__name__} excludes {excluded} from its JSON, so its tasks cannot be sent as rows."
            )
        self._rows: Iterator[vf.Task] = iter(())
        self._place = -1

    async def seats(self) -> dict[str, bool]:
        """Return whether the policy plays and trains each seat, by name."""
        context = ModelContext("policy", EvalClientConfig(api_key_var=_NO_KEY), SamplingConfig())
        agents = self.env._episode_agents(context, [], None, None)
        await self.env.setup(agents)
        return {
            name: getattr(agents, name).trainable and seat.model is None and seat.client is None
            for name, seat in agent_config_fields(self.env.config).items()
        }

    async def rows(self, start: int, count: int) -> Fields:
        """Return tasks from index `start` as rows; unless `start` continues the last call, reading starts again."""
        if start != self._place:
            self._rows = itertools.islice(iter(self.tasks), start, None)
            self._place = start
        rows: list[Fields] = []
        size = 0
        while len(rows) < count and size < _MAX_ROWS_BYTES:
            task = next(self._rows, None)
            if task is None:
                return {"rows": rows, "has_ended": True}
            rows.append(task.data.model_dump(mode="json"))
            size += len(json.dumps(rows[-1]))
            self._place += 1
        return {"rows": rows, "has_ended": False}

    async def play(self, row: Fields, url: str, model: str, names: dict[str, str]) -> Fields:
        """Play one episode; `names` has the model's name for each trained seat."""
        task = self.task_class(self.data_class.model_validate(row), self.env.config.taskset.task)
        env = copy.copy(self.env)
        client = EvalClientConfig(base_url=url, api_key_var=_NO_KEY)
        # The policy also plays seats that are not trained; those answers are not recorded.
        untrained = f"{model}:aside"
        seats = {
            name: seat.model_copy(update={"client": client, "model": names.get(name, untrained)})
            for name, seat in agent_config_fields(env.config).items()
            if seat.model is None and seat.client is None
        }
        env.config = env.config.model_copy(update=seats)
        context = ModelContext(untrained, client, SamplingConfig())
        [slot] = env.slots(task)
        episode = await env.run_slot(slot, context)
        return {
            "errors": [_error(error) for error in episode.errors],
            "traces": [_trace(trace) for trace in episode.traces],
        }


def _trace(trace: vf.Trace) -> Fields:
    rewards = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
    info = {"info": trace.info, "state": trace.state.model_dump(), "stop_condition": trace.stop_condition}
    return {
        "seat": trace.agent.name,
        "rewards": rewards,
        "metrics": dict(trace.metrics),
        "errors": [] if trace.ok else [_error(error) for error in trace.errors],
        "is_truncated": bool(trace.is_truncated),
        "is_timeout": trace.is_timeout,
        "info": {name: _short(value) for name, value in info.items() if value},
    }


def _error(error: vf.Error) -> dict[str, str]:
    return {"type": error.type, "message": error.message[-4000:], "traceback": (error.traceback or "")[-8000:]}


def _short(value: object) -> object:
    """Convert a value to JSON types; a long value becomes a truncated JSON text."""
    text = json.dumps(value, default=str, skipkeys=True)
    if len(text) > _MAX_INFO_BYTES:
        return text[:_MAX_INFO_BYTES] + "…"
    return json.loads(text)


async def open_player(
    stack: contextlib.AsyncExitStack, **arguments: Any
) -> tuple[Fields, dict[str, Callable[..., Awaitable[object]]]]:
    """Open the environment; called by `worker_program.py`."""
    register_harness()
    player = Player(**arguments)
    await stack.enter_async_context(player.env.serving())
    opened = {"seats": await player.seats(), "is_infinite": not player.tasks.bounded}
    return opened, {"rows": player.rows, "play": player.play}
