"""`OpenSessions`: sessions that clients open with their first request."""

from __future__ import annotations

import hmac
import itertools
import time
from collections.abc import Callable, Sequence

from llmrl.data import Message, ToolSchema
from llmrl.endpoint.requests import ModelReply, ModelRequest, RefusedRequest
from llmrl.endpoint.session import Session
from llmrl.endpoint.tree import ChainKey, chain_keys

_IDLE_SECONDS = 600.0


class OpenSessions:
    """Sessions that clients open with their first request, named by its path or `X-Session-ID`.

    A request without a name joins the session that gave the last answer in its messages, or opens a
    new session. If several sessions gave the same answer to the same prompt, requests that continue
    it are distributed among them in turn. A session that was idle for ten minutes is ended.

    Args:
        open_session: function that makes a session with a name.
        api_key: key that clients must send; None accepts all clients.
        on_end: function that is called with each ended session.
    """

    def __init__(
        self,
        open_session: Callable[[str], Session],
        *,
        api_key: str | None = None,
        on_end: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._open_session = open_session
        self._api_key = api_key
        self._on_end = on_end
        self._sessions: dict[str, Session] = {}
        # By the key of an answer: the names of the sessions that gave it, except those of clients.
        self._by_answer: dict[ChainKey, list[str]] = {}
        self._numbers = itertools.count()

    @property
    def needs_key(self) -> bool:
        """Whether clients must send a key."""
        return self._api_key is not None

    def __len__(self) -> int:
        return len(self._sessions)

    def check(self, api_key: str | None, session_id: str | None) -> None:
        """Check a client's key, if required. Raises RefusedRequest if it is wrong."""
        if self._api_key is None:
            return
        given = (api_key or "").encode(errors="surrogateescape")  # a header may hold any bytes
        if not hmac.compare_digest(given, self._api_key.encode()):
            raise RefusedRequest("the key is wrong.", status=401, code="invalid_api_key")

    def find(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return the session of a request. Raises RefusedRequest if the key is wrong."""
        self.check(api_key, session_id)
        names = self._candidates(session_id, request) or [f"unnamed/{next(self._numbers)}"]
        names.append(name := names.pop(0))  # the next request that continues this answer joins the next
        if name not in self._sessions:
            self._sessions[name] = self._open_session(name)
        return self._sessions[name]

    def look_up(self, api_key: str | None, session_id: str | None, request: ModelRequest) -> Session:
        """Return the session that `find` would return, but do not keep a new one, and take no turn.

        Raises RefusedRequest if the key is wrong.
        """
        self.check(api_key, session_id)
        name = next(iter(self._candidates(session_id, request)), "unnamed/counted")
        return self._sessions.get(name) or self._open_session(name)

    def named(self, api_key: str | None, session_id: str | None, reply_id: str = "") -> Session | None:
        """Return the session that the client names, or None. Raises RefusedRequest if the key is wrong."""
        self.check(api_key, session_id)
        return self._sessions.get(f"named/{session_id}")

    def _candidates(self, session_id: str | None, request: ModelRequest) -> list[str]:
        """Return the names of the sessions that a request may join, the next first; none for a new one."""
        if session_id is not None:
            return [f"named/{session_id}"]
        if request.known_id is not None:
            answered = (name for name, session in self._sessions.items() if request.known_id in session.replies)
            return [next(answered, "unnamed/none")]  # a session without answers, which refuses the id
        for key in reversed(_answer_keys(request.messages, request.tools)):
            if names := self._by_answer.get(key):
                return names
        return []

    def note_answers(self, session: Session, request: ModelRequest, reply: ModelReply) -> None:
        """Record which conversations a session has answered, for requests that continue them."""
        if session.session_id not in self._sessions or session.session_id.startswith("named/"):
            return
        for answer in reply.answers:
            key = _answer_keys((*request.messages, answer.message()), request.tools)[-1]
            names = self._by_answer.setdefault(key, [])
            if session.session_id not in names:
                names.append(session.session_id)

    def end_idle(self) -> None:
        """End the idle sessions; must be called regularly."""
        now_s = time.monotonic()
        for name, session in list(self._sessions.items()):
            if now_s - session.last_used_s > _IDLE_SECONDS and not session.is_asked:
                self._end(name)
        left = ((key, [name for name in names if name in self._sessions]) for key, names in self._by_answer.items())
        self._by_answer = {key: names for key, names in left if names}

    def end_all(self) -> None:
        """End all sessions."""
        for name in list(self._sessions):
            self._end(name)

    def _end(self, name: str) -> None:
        session = self._sessions.pop(name)
        session.end()
        self._on_end(session)


def _answer_keys(messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[ChainKey]:
    """Return a key for each answer and all before it; without reasoning, which few clients send back."""
    said = [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]
    keys = chain_keys(said, tools)[1:]
    return [key for key, message in zip(keys, said, strict=True) if message["role"] == "assistant"]
