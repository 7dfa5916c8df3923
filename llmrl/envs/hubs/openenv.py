"""`OpenEnvChatEnv`: conversations with the environments of an OpenEnv server, over WebSockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from llmrl._utils.arguments import check_positive
from llmrl._utils.failure import describe
from llmrl._utils.imports import require
from llmrl._utils.types import Row
from llmrl.data import Message, text_of
from llmrl.data.message import copied, system_messages
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.sampler import DrawOptions

if TYPE_CHECKING:
    import aiohttp

_MAX_MESSAGE_BYTES = 100 << 20  # same limit as OpenEnv's client; observations may be screenshots
_CLOSE_SECONDS = 5.0
_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0


class OpenEnvChatEnv(MessageChatEnv):
    """Conversations with an OpenEnv server (https://github.com/meta-pytorch/OpenEnv); its package is not needed.

    Each conversation has its own session, which is reset with a row of the dataset (a column `seed`, for example).
    Observations are user messages, answers are actions, and the rewards of the steps are summed. Opening a session is
    retried while the server is unreachable or full. A lost session ends its rollout with an error. An action that the
    server refuses as invalid, or for which `action_adapter` raises ValueError, is answered with the reason.

    Args:
        dataset, **draws: see `MessageChatEnv`.
        action_adapter: function that converts the text of an answer to the action, a dict. By
            default the text is the only required field of the server's action schema.
        observation_adapter: function that converts each observation, a dict, before it is used; if
            the result is a dict, it is stored as `("next", "env_info")`.
        history_content_adapter: function that converts an observation to a text. By default the
            text is the only field besides `metadata`, or all such fields as JSON.
        timeout: time limit of opening a session and of each answer, in seconds.

    Raises:
        MissingExtraError: if aiohttp is not installed.

    Example:
        >>> env = OpenEnvChatEnv("http://127.0.0.1:8000", [{"seed": 1}], repeats=8)
        >>> env.prompts.num_samples
        8
    """

    def __init__(
        self,
        url: str,
        dataset: str | Path | Iterable[Row] | None = None,
        *,
        action_adapter: Callable[[str], Mapping[str, object]] | None = None,
        observation_adapter: Callable[..., object] | None = None,
        history_content_adapter: Callable[..., str] | None = None,
        system_prompt: str | None = None,
        timeout: float = 60.0,
        device: torch.device | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        check_positive(timeout=timeout)
        require("aiohttp", extra="server")
        if "://" not in url:
            url = f"http://{url}"
        server = _Server(
            f"http{url.removeprefix('http').removeprefix('ws')}".rstrip("/"),
            action_adapter,
            observation_adapter or (lambda observation: observation),
            history_content_adapter or _content_of,
            system_prompt,
            timeout,
        )
        super().__init__(lambda row: _Session(server, row), dataset, device=device, **draws)


@dataclass(slots=True)
class _Server:
    url: str
    action: Callable[[str], Mapping[str, object]] | None
    """Function that converts a text to an action; None until the server has sent its schema."""
    observation: Callable[[object], object]
    content: Callable[[object], str]
    system_prompt: str | None
    timeout: float


class _NotNow(Exception):
    """A session cannot be opened yet."""


class _InvalidAction(Exception):
    """The server refused an action that does not match its schema; the reason is sent to the model."""


class _Session(MessageEnv):
    """A conversation over a WebSocket; a background task reads it, so that pings are answered during generation."""

    def __init__(self, server: _Server, row: Row) -> None:
        self._server = server
        self._row = row
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse
        self._reader: asyncio.Task[None]
        self._received: asyncio.Queue[str | None] = asyncio.Queue()
        self._why_lost = ""

    async def init(self) -> list[Message]:
        server = self._server
        why = "it did not answer"
        wait = _FIRST_WAIT_SECONDS
        try:
            async with asyncio.timeout(server.timeout):
                while True:
                    try:
                        observation, step = await self._begin()
                        break
                    except _NotNow as error:
                        why = str(error)
                    await self.close()
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
        except TimeoutError:
            raise ConnectionError(f"{server.url} opened no session within {server.timeout:g} s: {why}.") from None
        if step.is_done:
            raise ValueError(f"{server.url} ended the conversation before its first answer.")
        content = server.content(copied(observation))
        return [*system_messages(server.system_prompt), {"role": "user", "content": content}]

    async def _begin(self) -> tuple[object, MessageStep]:
        import aiohttp

        server = self._server
        self._received = asyncio.Queue()
        self._http = aiohttp.ClientSession()
        try:
            if server.action is None:
                server.action = await self._action_of_text(self._http)
            self._socket = await self._http.ws_connect(f"{server.url}/ws", max_msg_size=_MAX_MESSAGE_BYTES)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status in range(400, 500):
                raise ConnectionError(f"{server.url} is not an OpenEnv server: {describe(error)}") from error
            raise _NotNow(describe(error)) from error
        self._reader = asyncio.create_task(self._read())
        try:
            return await self._ask({"type": "reset", "data": self._row})
        except ConnectionError as error:
            raise _NotNow(str(error)) from error

    async def _action_of_text(self, http: aiohttp.ClientSession) -> Callable[[str], Mapping[str, object]]:
        """Return a function that converts a text to an action of the server's schema."""
        async with http.get(f"{self._server.url}/schema", raise_for_status=True) as response:
            schema = await response.json()
        fields = {name: one for name, one in schema["action"]["properties"].items() if name != "metadata"}
        asked = schema["action"].get("required") or list(fields)
        if len(asked) != 1 or fields[asked[0]].get("type") != "string":
            raise ValueError(
                f"an action of {self._server.url} is not a text but has the fields {sorted(fields)}: pass "
                "action_adapter, a function that converts the text of an answer to these fields."
            )
        return lambda text: {asked[0]: text}

    async def step(self, message: Message) -> MessageStep:
        assert self._server.action is not None
        try:
            action = self._server.action(text_of(message.get("content")))
            observation, step = await self._ask({"type": "step", "data": action})
        except (ValueError, _InvalidAction) as error:  # raised by the adapter, or on the server's refusal
            reason = str(error) if isinstance(error, _InvalidAction) else describe(error)
            told: Message = {"role": "user", "content": f"The action was refused: {reason}"}
            return MessageStep(messages=[told], info={"refused_action": reason})
        messages: list[Message] = [{"role": "user", "content": self._server.content(copied(observation))}]
        return step if step.is_done else replace(step, messages=messages)

    async def _ask(self, question: Mapping[str, object]) -> tuple[object, MessageStep]:
        url = self._server.url
        is_unasked = not self._received.empty()
        if not is_unasked:
            with contextlib.suppress(ConnectionError):  # the reader stores the reason
                await self._socket.send_str(json.dumps(question))
        try:
            async with asyncio.timeout(self._server.timeout):
                received = await self._received.get()
        except TimeoutError:
            raise RuntimeError(f"{url} did not answer within {self._server.timeout:g} s.") from None
        if received is None:
            self._received.put_nowait(None)
            raise ConnectionError(f"{url} ended the session: {self._why_lost}")
        try:
            answer = json.loads(received)
            kind = answer["type"]
            data = answer["data"]
            if kind == "error":
                code = data.get("code")
                reason = data.get("errors") or data.get("message")
            else:
                observation = data["observation"]
                reward = data.get("reward")
                is_done = data["done"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RuntimeError(
                f"{url} answered {received!r:.200}, which is not an OpenEnv message: {describe(error)}"
            ) from error
        if kind == "error":
            if code == "CAPACITY_REACHED":
                raise _NotNow(f"it is full: {reason}")
            if code == "VALIDATION_ERROR" and question["type"] == "step":
                raise _InvalidAction(_as_text(reason))
            raise RuntimeError(f"{url} refused {question!r:.200}: {code}, {reason}")
        if is_unasked:
            raise RuntimeError(f"{url} sent {received!r:.200}, which was not requested.")
        observation = self._server.observation(observation)
        info = observation if isinstance(observation, dict) else {}
        return observation, MessageStep(reward=0.0 if reward is None else reward, is_done=bool(is_done), info=info)

    async def _read(self) -> None:
        async for message in self._socket:
            if not isinstance(message.data, str):
                self._why_lost = f"{message.data!r:.200}"
                break
            self._received.put_nowait(message.data)
        self._why_lost = self._why_lost or f"closed with code {self._socket.close_code}."
        self._received.put_nowait(None)

    async def close(self) -> None:
        http = self._http
        self._http = None
        if http is None:
            return
        async with http:
            if hasattr(self, "_reader"):
                with contextlib.suppress(Exception):  # the server may be gone
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await self._socket.send_str('{"type": "close"}')
                        await self._socket.close()
                self._reader.cancel()
                del self._reader


def _content_of(observation: object) -> str:
    if isinstance(observation, Mapping):
        observation = {name: value for name, value in observation.items() if name != "metadata"}
        if len(observation) == 1:
            [observation] = observation.values()
    return _as_text(observation)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
