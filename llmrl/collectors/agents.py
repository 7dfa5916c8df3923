"""Agents of an `AgentEnv`, which lead rollouts and call the policy at an endpoint."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from tensordict import TensorDictBase

from llmrl._utils.spans import here
from llmrl.collectors.completing import Completer
from llmrl.data import ChatHistory, History, Rollout
from llmrl.data.message import copied
from llmrl.data.tensordicts import container_of
from llmrl.endpoint import EndpointServer, ModelReply, ModelRequest, RefusedRequest, Session, SessionLimits, TurnTree
from llmrl.endpoint.agent import MODEL_NAME, AgentModel, AgentTimeout, model_name
from llmrl.endpoint.requests import ASIDE
from llmrl.engines import Completion, SamplingConfig
from llmrl.engines.base import check_supported
from llmrl.engines.token_stream import TokenStream
from llmrl.envs import AgentEnv
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Score


class KeyedSessions:
    """Open sessions, found by the secret key of an agent's run and a role's model name."""

    def __init__(self) -> None:
        self._open: dict[str, dict[str, Session]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, *sessions: Session, names: Sequence[str] = ("policy",)) -> str:
        """Add the sessions of an agent's roles under their model names, and return their key."""
        key = f"llmrl-{secrets.token_urlsafe(24)}"
        self._open[key] = dict(zip(names, sessions, strict=True))
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
        """Return the session of the request's model, or the first one if the model is unknown.

        The key is sent as the API key or as the session id. Raises RefusedRequest if the key is unknown.
        """
        roles = self._of(api_key, session_id)
        return roles.get(request.model.removesuffix(ASIDE)) or next(iter(roles.values()))

    def look_up(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return what `find` returns, which opens no session."""
        return self.find(api_key, session_id, request)

    def named(self, api_key: str | None, session_id: str | None, reply_id: str = "") -> Session | None:
        """Return the session of a key with the reply, or the first; None for an unknown key."""
        roles = self._open.get(session_id or "") or self._open.get(api_key or "") or {}
        answered = (session for session in roles.values() if reply_id in session.replies)
        return next(answered, next(iter(roles.values()), None))

    def note_answers(self, session: Session, request: ModelRequest, reply: ModelReply) -> None:
        """Do nothing: sessions are found by their keys."""

    def _of(self, api_key: str | None, session_id: str | None) -> dict[str, Session]:
        roles = self._open.get(session_id or "") or self._open.get(api_key or "")
        if roles is None:
            raise RefusedRequest("the key is unknown, or its session has ended.", status=401, code="invalid_api_key")
        return roles


@dataclass(eq=False)
class AgentPlay:
    """One run of an agent: the first rollout of its roles runs it, the others wait for it."""

    sessions: Mapping[str, Session]
    """Session of each trained role."""
    scores: Mapping[str, Score] | None = None
    error: BaseException | None = None
    """Exception that ended the agent, or None."""
    is_over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def failure(self) -> Exception | None:
        """Engine failure of a role's last request, or None; after one, no role is scored."""
        return next((session.failure for session in self.sessions.values() if session.failure is not None), None)

    @property
    def refusal(self) -> str:
        """Limit for which a request was refused, so the agent may have failed; or empty."""
        reasons = (session.reason or session.last_refusal for session in self.sessions.values())
        return next(filter(None, reasons), "")


class AgentEndpoint:
    """Endpoint at which a collector's agents call their policies; it starts to listen when the first agent runs.

    Args:
        policy: policy of the roles that have none in `agent_env.policies`.
        limits: limits of each session.
        agent_env: environment that defines the roles, the policies of some roles, and the address.
        make_completer: function that returns the completer of a policy.

    Raises:
        TypeError: if an entry of `agent_env.policies` is not a policy.
        ValueError: if a policy has no renderer or is not in history mode.
        MissingExtraError: if aiohttp is not installed.
    """

    def __init__(
        self,
        policy: LLMWrapperBase,
        limits: SessionLimits,
        agent_env: AgentEnv,
        make_completer: Callable[[LLMWrapperBase], Completer],
    ) -> None:
        self._policies = dict.fromkeys(agent_env.roles, policy)
        for role, other in agent_env.policies.items():
            if not isinstance(other, LLMWrapperBase):
                raise TypeError(
                    f"policies must map roles to policies such as a vLLMWrapper, got {other!r:.80} for {role!r}."
                )
            self._policies[role] = other
        for other in self._policies.values():
            if other.renderer is None or other.input_mode != "history":
                raise ValueError("agents speak messages: build the policy with input_mode='history' and tokenizer=.")
        self._completers = {role: make_completer(other) for role, other in self._policies.items()}
        self._limits = limits
        self._env = agent_env
        self._sessions = KeyedSessions()
        self._names = [model_name(role) for role in self._policies]
        self._server = EndpointServer(self._sessions, model_names=dict.fromkeys((MODEL_NAME, *self._names)))
        self._plays: dict[tuple[str, int], AgentPlay] = {}
        self._num_arrived: Counter[tuple[str, int]] = Counter()
        self._serving: asyncio.Task[None] | None = None
        self._is_listening = asyncio.Event()

    async def play(
        self, rollout: Rollout, run: Callable[[AgentModel], Awaitable[Mapping[str, Score]]]
    ) -> tuple[AgentPlay, Session]:
        """Run the agent once for the rollouts of all its roles; write the session's records into the rollout.

        Returns the run and the session of the rollout's role.
        """
        try:
            await self._listen()
        except BaseException:
            self.skip(rollout)
            raise
        number, role = divmod(rollout.sample_index, len(self._env.roles))
        rollout.role = self._env.roles[role]
        place = (rollout.group_id, number)
        is_first = place not in self._plays
        if is_first:
            self._plays[place] = AgentPlay({role: self._session(rollout, role) for role in self._env.roles})
        play = self._plays[place]
        self._arrive(place)
        session = play.sessions[rollout.role]
        try:
            if is_first:
                await self._lead(play, rollout, run)
            else:
                await play.is_over.wait()
        finally:
            tree = session.tree
            rollout.conversation = tree
            rollout.messages = tree.messages
            rollout.turns = tree.to_records()
            rollout.num_turns = tree.num_turns
            rollout.num_completion_tokens = session.num_completion_tokens
            rollout.info |= copied(session.record())
        return play, session

    async def _lead(
        self, play: AgentPlay, rollout: Rollout, run: Callable[[AgentModel], Awaitable[Mapping[str, Score]]]
    ) -> None:
        untrained = (role for role in self._policies if role not in play.sessions)
        sessions = [*play.sessions.values(), *(self._session(rollout, role, is_recorded=False) for role in untrained)]
        first = MODEL_NAME if len(self._policies) > 1 else self._names[0]
        by_name = {first: sessions[0], **dict(zip(self._names, sessions, strict=True))}
        key = self._sessions.add(*by_name.values(), names=list(by_name))
        url = self._server.url
        if self._env.public_url is not None:
            url = self._env.public_url.replace("{port}", str(self._server.port))

        def reward(reply_id: str, value: float, answer: int) -> None:
            session = self._sessions.named(key, None, reply_id)
            if session is None:
                raise RefusedRequest("the agent's run has ended: give rewards before it returns.")
            session.replies.reward(reply_id, value, answer)

        model = AgentModel(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1",
            api_key=key,
            name=first,
            info=sessions[0].info,
            give_reward=reward,
            infos={role: session.info for role, session in zip(self._policies, sessions, strict=True) if role},
        )
        try:
            play.scores = await run(model)
        except asyncio.CancelledError as error:
            play.error = AgentTimeout("the agent was cancelled.").with_traceback(error.__traceback__)
            raise
        except Exception as error:
            play.error = error
        finally:
            try:
                for session in sessions:
                    await session.finish()
            finally:  # also if the rollout is cancelled while it waits for answers that are read
                for session in sessions:
                    session.end()
                self._sessions.remove(key)
                play.is_over.set()

    def skip(self, rollout: Rollout) -> None:
        """Count a rollout that failed before it joined; the other roles play without it."""
        self._arrive((rollout.group_id, rollout.sample_index // len(self._env.roles)))

    def _arrive(self, place: tuple[str, int]) -> None:
        """Count a role that has joined its run or was skipped; forget the run after the last."""
        self._num_arrived[place] += 1
        if self._num_arrived[place] == len(self._env.roles):
            del self._num_arrived[place]
            self._plays.pop(place, None)

    def _session(self, rollout: Rollout, role: str, *, is_recorded: bool = True) -> Session:
        numbers = itertools.count()
        parent = here()  # requests run in the server's tasks, which do not inherit this span
        policy, completer = self._policies[role], self._completers[role]

        async def complete(
            prompt_ids: list[int], sampling: SamplingConfig, *, stream: TokenStream | None = None
        ) -> Completion:
            name = f"{rollout.rollout_id}/{role}{next(numbers)}"
            self._env.ask_loops()
            completion = await completer.complete(
                prompt_ids, sampling, name=name, routing_key=rollout.group_id, parent=parent, stream=stream
            )
            self._env.warn_if_blocked()
            return completion

        most = min(self._limits.max_prompt_tokens, policy.engine.max_model_len - 1)
        return Session(
            rollout.rollout_id,
            TurnTree(policy.renderer, mode=policy.conversation_mode),
            complete,
            policy.sampling,
            replace(self._limits, max_prompt_tokens=most),
            check_sampling=partial(check_supported, policy.engine),
            is_recorded=is_recorded,
        )

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

    def write_last(self, element: TensorDictBase, session: Session, *, role: str, is_read: bool) -> None:
        """Write the last answered conversation as the turn that ends the rollout."""
        if not session.tree.turns:
            prompt: History = element.get(("history", "prompt"))
            element.set("history", container_of(ChatHistory, {"prompt": prompt, "full": prompt}))
            return
        turn = session.tree.turns[-1]
        before = History.from_chats(turn.conversation.messages[:-1], check=False)
        element.set("history", container_of(ChatHistory, {"prompt": before}))
        self._policies[role].write_turn(element, turn.conversation, turn.completion, is_read=is_read)
