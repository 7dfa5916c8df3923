"""`OpenEnvServer`: serves an environment of llmrl by OpenEnv's protocol, for trainers of other libraries."""

from __future__ import annotations

import asyncio
import hmac
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from llmrl._utils.failure import describe
from llmrl._utils.imports import require
from llmrl._utils.json_values import as_json
from llmrl._utils.types import JSON
from llmrl.data import History, Message
from llmrl.data.tensordicts import plain
from llmrl.endpoint.dialects import chat
from llmrl.endpoint.requests import RefusedRequest
from llmrl.envs.agent import AgentEnv
from llmrl.envs.chat import ChatEnv
from llmrl.envs.game import GameEnv
from llmrl.envs.primer import dataset_env_of
from llmrl.envs.sampler import PromptSampler
from llmrl.envs.sources import StreamedRows
from llmrl.envs.stepper import EnvStepper
from llmrl.transforms import environment_parts, find_rubric_rewards, joint_rubric
from llmrl.transforms.parts import writes_reward

if TYPE_CHECKING:
    from aiohttp import web
    from aiohttp.typedefs import Handler

_MAX_MESSAGE_BYTES = 100 << 20  # as OpenEnv's own client and server
_ACTION_FIELDS = ("content", "tool_calls", "reasoning_content", "metadata")
_RESET_FIELDS = ("seed", "episode_id")
_CLOSE_SECONDS = 1.0


def _text(about: str) -> dict[str, JSON]:
    return {"type": "string", "description": about}


_MESSAGES: JSON = {"type": "array", "items": {"type": "object"}, "description": "Messages since the last action."}
SCHEMAS: dict[str, JSON] = {
    "action": {
        "title": "ChatAction",
        "description": "A message of the assistant.",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "content": _text("The text."),
            "tool_calls": {"type": "array", "items": {"type": "object"}, "description": "Calls, in OpenAI's form."},
            "reasoning_content": _text("The reasoning that precedes the text."),
            "metadata": {"type": "object"},
        },
        "required": ["content"],
    },
    "observation": {
        "title": "ChatObservation",
        "type": "object",
        "properties": {
            "messages": _MESSAGES,
            "tools": {"type": "array", "items": {"type": "object"}, "description": "The tools; at a reset."},
            "metadata": {"type": "object"},
        },
        "required": ["messages"],
    },
    "state": {
        "title": "ChatState",
        "type": "object",
        "properties": {
            "episode_id": _text("The id that the client gave the episode, or the group id of the problem."),
            "step_count": {"type": "integer"},
            "num_problems": {"type": ["integer", "null"], "description": "Null for problems without end."},
        },
    },
}


class _Refused(Exception):
    """Raised for a client's message that cannot be processed; `code` is OpenEnv's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True)
class _Conversation:
    element: TensorDictBase
    episode_id: str
    num_steps: int = 0
    is_done: bool = False


@dataclass(slots=True)
class _Session:
    """A client's connection, which has one conversation at a time."""

    conversation: _Conversation | None = None


class OpenEnvServer:
    """Serves an environment by OpenEnv's protocol (https://github.com/meta-pytorch/OpenEnv), over WebSockets.

    Each connection is a session. `reset` opens the next problem, or the one at the position `seed` of the environment's
    order. An action is an assistant message: `content`, and `tool_calls` if the environment has tools. An observation
    contains the `messages` since the last action. Rewards are those of the environment's steps, or None for a
    conversation that ended without a score; the metadata of the last observation contains the breakdown.

    Args:
        env: environment over a dataset, with `input_mode="history"`.
        name: name of the environment for clients.
        api_key: key that clients must send as `Authorization: Bearer KEY`; None for no key.
        step_timeout_seconds: time limit of a reset or a step.

    Raises:
        ValueError: if the environment cannot be served over the protocol, or `api_key` is empty.
        MissingExtraError: if aiohttp is not installed.

    Example:
        >>> from llmrl.envs import AdditionEnv
        >>> OpenEnvServer(AdditionEnv.make()).url
        Traceback (most recent call last):
        RuntimeError: the server was not started.
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        name: str = "llmrl",
        api_key: str | None = None,
        step_timeout_seconds: float | None = None,
    ) -> None:
        require("aiohttp", extra="server")
        if api_key == "":
            raise ValueError("api_key must be a key that clients must send, or None for no key, got ''.")
        self.env = env
        self.name = name
        self._prompts = _playable_prompts(env)
        self._api_key = api_key
        self._stepper = EnvStepper(env, timeout_seconds=step_timeout_seconds)
        self._runner: web.AppRunner | None = None
        self._sockets: set[web.WebSocketResponse] = set()

    @property
    def url(self) -> str:
        """Address for clients. Raises RuntimeError before `start`."""
        if self._runner is None:
            raise RuntimeError("the server was not started.")
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start to listen; raise OSError if the port is taken."""
        from aiohttp import web

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._has_key(request):
                return await handler(request)
            return web.json_response({"detail": "Send the key as Authorization: Bearer KEY."}, status=401)

        app = web.Application(middlewares=[check])
        app.add_routes(
            [
                web.get("/health", lambda request: _answered({"status": "healthy"})),
                web.get("/metadata", lambda request: _answered({"name": self.name, "description": self._about()})),
                web.get("/schema", lambda request: _answered(SCHEMAS)),
                web.get("/ws", self._serve),
            ]
        )
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def close(self) -> None:
        """Close all sessions and the environment."""
        await asyncio.gather(*(socket.close(code=1001, message=b"the server ends") for socket in self._sockets))
        if self._runner is not None:
            await self._runner.cleanup()
        self._stepper.shutdown()
        self.env.close(raise_if_closed=False)

    def _about(self) -> str:
        size = self._num_problems()
        return f"{type(self.env).__name__} of llmrl, {'endless' if size is None else size} problems."

    def _num_problems(self) -> int | None:
        items = self._prompts.items
        return None if isinstance(items, StreamedRows) and not items.has_ended else len(items)

    def _has_key(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return self._api_key is None or hmac.compare_digest(given.encode(), self._api_key.encode())

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        """Answer the messages of one connection, in order."""
        from aiohttp import WSMsgType, web

        # No pings: a client that generates for minutes in its event loop would not answer them.
        socket = web.WebSocketResponse(max_msg_size=_MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        self._sockets.add(socket)
        session = _Session()
        try:
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    break
                answer = await self._answer(session, message.data)
                if answer is None:
                    break
                await socket.send_str(json.dumps(answer))
        finally:
            self._sockets.discard(socket)
            await self._release(session)
        await socket.close()
        return socket

    async def _answer(self, session: _Session, text: str) -> dict[str, JSON] | None:
        """Return the answer to a message; None for `close`."""
        try:
            kind, data = _read(text)
            if kind == "close":
                return None
            if kind == "reset":
                return {"type": "observation", "data": await self._reset(session, data)}
            if kind == "step":
                return {"type": "observation", "data": await self._step(session, data)}
            if kind == "state":
                return {"type": "state", "data": self._state(session)}
            raise _Refused("UNKNOWN_TYPE", f"Unknown message type: {kind!r:.80}")
        except _Refused as error:
            return _error(error.code, str(error))
        except Exception as error:  # the environment's error ends only this conversation
            if session.conversation is not None:
                session.conversation.is_done = True
            return _error("EXECUTION_ERROR", describe(error))

    async def _reset(self, session: _Session, data: dict[str, JSON]) -> dict[str, JSON]:
        if unknown := [name for name in data if name not in _RESET_FIELDS]:
            raise _Refused("VALIDATION_ERROR", f"a reset takes {' and '.join(_RESET_FIELDS)}, got {unknown}.")
        seed = data.get("seed")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool) or seed < 0):
            raise _Refused("VALIDATION_ERROR", f"seed must be the position of a problem, from 0, got {seed!r:.80}.")
        await self._release(session)
        if seed is not None:
            await self._stepper.call(self._read_up_to, seed)
        element = await self._stepper.open(await self._stepper.draw(self._prompts, seed))
        messages = element.get(("history", "prompt")).chats
        episode = str(data.get("episode_id") or plain(element.get(("rollout", "group_id"))))
        session.conversation = _Conversation(element, episode)
        observation: dict[str, JSON] = {"messages": as_json(messages)}
        if tools := plain(element.get("tools", None)):
            observation["tools"] = as_json(tools)
        return {"observation": observation, "reward": None, "done": False}

    def _read_up_to(self, position: int) -> None:
        """Read streamed rows up to the problem at a position; called in the thread of the environment."""
        if isinstance(self._prompts.items, StreamedRows):
            self._prompts.items.read(position // self._prompts.num_samples + 1)

    async def _step(self, session: _Session, data: dict[str, JSON]) -> dict[str, JSON]:
        conversation = session.conversation
        if conversation is None or conversation.is_done:
            state = "no conversation is open" if conversation is None else "the conversation has ended"
            raise _Refused("EXECUTION_ERROR", f"{state}: send a reset first.")
        element = conversation.element
        prompt = element.get(("history", "prompt"))
        full = History.from_chats((*prompt.chats, _message_of(data)), check=False)
        element.set(("history", "full"), full)
        stepped, conversation.element = await self._stepper.step(element)
        conversation.num_steps += 1
        step = stepped.get("next")
        if error := plain(step.get("env_error", None)) or plain(step.get("score_error", None)):
            conversation.is_done = True
            raise _Refused("EXECUTION_ERROR", error)
        conversation.is_done = any(bool(step[key].any()) for key in ("done", "terminated", "truncated"))
        chat = step.get(("history", "prompt")).chats
        new = chat[len(full.chats) :]
        reward: float | None = float(step["reward"].sum())
        metadata: dict[str, JSON] = {}
        if conversation.is_done:
            metadata = _outcome(step)
            if "is_scored" in step and not bool(step["is_scored"].all()):
                reward = None
        return {
            "observation": {"messages": as_json(new), "metadata": metadata},
            "reward": reward,
            "done": conversation.is_done,
            "metadata": metadata,
        }

    def _state(self, session: _Session) -> dict[str, JSON]:
        conversation = session.conversation
        return {
            "episode_id": getattr(conversation, "episode_id", None),
            "step_count": getattr(conversation, "num_steps", 0),
            "num_problems": self._num_problems(),
        }

    async def _release(self, session: _Session) -> None:
        conversation = session.conversation
        session.conversation = None
        if conversation is not None:
            await self._stepper.release(conversation.element)


def _playable_prompts(env: EnvBase) -> PromptSampler:
    """Return the sampler of an environment; raise ValueError if it cannot be served."""
    drawing = dataset_env_of(env)
    inner = environment_parts(env)[0]
    rubric = joint_rubric(find_rubric_rewards(env))
    if drawing is None:
        reason = "has no dataset to open problems from"
    elif isinstance(inner, AgentEnv | GameEnv):
        reason = "is played by its own agent, or by several players"
    elif not isinstance(inner, ChatEnv) or inner.input_mode != "history":
        reason = "does not read messages (input_mode='history')"
    elif not writes_reward(env):
        reason = "writes no reward: append a RubricReward, for example"
    elif rubric is not None and rubric.is_group_scored:
        reason = "scores whole groups, but a client plays single conversations"
    else:
        return drawing.prompts
    raise ValueError(f"{type(inner).__name__} cannot be served: it {reason}.")


def _read(text: str) -> tuple[str, dict[str, JSON]]:
    """Return the type and the data of a message."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Refused("INVALID_JSON", f"Invalid JSON: {error}") from None
    is_valid = isinstance(message, dict) and isinstance(message.get("type"), str)
    if not is_valid or not isinstance(data := message.get("data", {}), dict):
        raise _Refused("VALIDATION_ERROR", f'a message must be {{"type": …, "data": {{…}}}}, got {text!r:.80}.')
    return message["type"], data


def _message_of(action: dict[str, JSON]) -> Message:
    if unknown := [name for name in action if name not in _ACTION_FIELDS]:
        raise _Refused("VALIDATION_ERROR", f"an action has the fields {', '.join(_ACTION_FIELDS)}, got {unknown}.")
    if action.get("content") is None and not action.get("tool_calls"):
        raise _Refused("VALIDATION_ERROR", "an action needs content, the text of the assistant.")
    try:
        [message] = chat.read({"messages": [{**action, "role": "assistant"}]}).messages
    except RefusedRequest as error:
        raise _Refused("VALIDATION_ERROR", str(error)) from None
    for call in message.get("tool_calls", ()):
        if not call["id"]:  # a chat template may render an empty id
            del call["id"]
    return message


def _outcome(step: TensorDictBase) -> dict[str, JSON]:
    """Return how a conversation ended, for the metadata of the last observation."""
    is_truncated = bool(step["truncated"].any()) and not bool(step["terminated"].any())
    parts = step.get("reward_breakdown", {}).items()
    rewards: dict[str, JSON] = {name: float(value) for name, value in parts if not value.isnan().any()}
    return {"is_truncated": is_truncated, "rewards": rewards}


def _error(code: str, message: str) -> dict[str, JSON]:
    return {"type": "error", "data": {"message": message, "code": code}}


async def _answered(content: object) -> web.Response:
    from aiohttp import web

    return web.json_response(content)
