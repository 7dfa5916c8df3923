"""Agents of an `AgentEnv`, each of which leads a rollout and calls the policy at the collector's endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncIterator
from functools import partial

from tensordict import TensorDictBase

from llmrl._utils.spans import here
from llmrl.collectors.completing import Completer
from llmrl.data import ChatHistory, History, Rollout
from llmrl.data.message import copied
from llmrl.data.tensordicts import container_of
from llmrl.endpoint import EndpointServer, ModelReply, ModelRequest, RefusedRequest, Session, SessionLimits, TurnTree
from llmrl.endpoint.agent import AgentModel
from llmrl.engines import Completion, SamplingConfig
from llmrl.engines.base import check_supported
from llmrl.engines.token_stream import TokenStream
from llmrl.envs import AgentEnv
from llmrl.policies import LLMWrapperBase


class KeyedSessions:
    """Sessions by their secret keys."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, session: Session) -> str:
        """Open a session and return its key."""
        key = f"llmrl-{secrets.token_urlsafe(24)}"
        self._open[key] = session
        return key

    def remove(self, key: str) -> None:
        """Remove a key."""
        del self._open[key]

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return True

    def check(self, api_key: str | None, session_id: str | None) -> None:
        """Raise `RefusedRequest` unless the key belongs to an open session."""
        self._of(api_key, session_id)

    def find(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return the session of a key, sent as API key or as session id; raise `RefusedRequest` if it is unknown."""
        return self._of(api_key, session_id)

    def named(self, api_key: str | None, session_id: str | None) -> Session | None:
        """Return the open session of a key, or None."""
        return self._open.get(session_id or "") or self._open.get(api_key or "")

    def note_answers(self, session: Session, request: ModelRequest, reply: ModelReply) -> None:
        """Do nothing: sessions are found by their keys."""

    def _of(self, api_key: str | None, session_id: str | None) -> Session:
        session = self.named(api_key, session_id)
        if session is None:
            raise RefusedRequest("the key is unknown, or its session has ended.", status=401, code="invalid_api_key")
        return session


class AgentEndpoint:
    """Endpoint for a collector's agents. It starts with the first session, at the address of the environment.

    Raises:
        ValueError: if the policy has no renderer or is not in history mode.
        MissingExtraError: if aiohttp is not installed.
    """

    def __init__(
        self, policy: LLMWrapperBase, completer: Completer, limits: SessionLimits, agent_env: AgentEnv
    ) -> None:
        if policy.renderer is None or policy.input_mode != "history":
            raise ValueError("agents speak messages: build the policy with input_mode='history' and tokenizer=.")
        self._policy = policy
        self._completer = completer
        self._limits = limits
        self._env = agent_env
        self._sessions = KeyedSessions()
        self._server = EndpointServer(self._sessions)
        self._serving: asyncio.Task[None] | None = None
        self._is_listening = asyncio.Event()

    @contextlib.asynccontextmanager
    async def session(self, rollout: Rollout) -> AsyncIterator[tuple[Session, AgentModel]]:
        """Open a session for a rollout's agent; write its records into the rollout when the context ends."""
        await self._listen()
        numbers = itertools.count()
        parent = here()  # requests run in tasks of the server

        async def complete(
            prompt_ids: list[int], sampling: SamplingConfig, *, stream: TokenStream | None = None
        ) -> Completion:
            name = f"{rollout.rollout_id}/{next(numbers)}"
            self._env.ask_loops()
            completion = await self._completer.complete(
                prompt_ids, sampling, name=name, routing_key=rollout.group_id, parent=parent, stream=stream
            )
            self._env.warn_if_blocked()
            return completion

        tree = TurnTree(self._policy.renderer, mode=self._policy.conversation_mode)
        check = partial(check_supported, self._policy.engine)
        session = Session(rollout.rollout_id, tree, complete, self._policy.sampling, self._limits, check_sampling=check)
        key = self._sessions.add(session)
        public_url = self._env.public_url
        url = self._server.url if public_url is None else public_url.replace("{port}", str(self._server.port))
        url = f"{url.rstrip('/').removesuffix('/v1')}/v1"
        try:
            yield (
                session,
                AgentModel(
                    base_url=url,
                    api_key=key,
                    name=self._server.model_name,
                    info=session.info,
                    give_reward=session.replies.reward,
                ),
            )
        finally:
            await session.finish()
            self._sessions.remove(key)
            rollout.conversation = tree
            rollout.messages = tree.messages
            rollout.turns = tree.to_records()
            rollout.num_turns = tree.num_turns
            rollout.num_completion_tokens = session.num_completion_tokens
            rollout.info |= copied(session.record())

    async def _listen(self) -> None:
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        listening = asyncio.ensure_future(self._is_listening.wait())
        await asyncio.wait((listening, self._serving), return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()
        if self._serving.done():
            self._serving.result()

    async def _serve(self) -> None:
        try:
            await self._server.start(self._env.host, self._env.port)
            self._is_listening.set()
            await asyncio.Event().wait()
        finally:
            await self._server.close()

    def write_last(self, element: TensorDictBase, session: Session, *, is_read: bool) -> None:
        """Write the last answered conversation as the turn that ends the rollout."""
        if not session.tree.turns:
            prompt: History = element.get(("history", "prompt"))
            element.set("history", container_of(ChatHistory, {"prompt": prompt, "full": prompt}))
            return
        turn = session.tree.turns[-1]
        before = History.from_chats(turn.conversation.messages[:-1], check=False)
        element.set("history", container_of(ChatHistory, {"prompt": before}))
        self._policy.write_turn(element, turn.conversation, turn.completion, is_read=is_read)
