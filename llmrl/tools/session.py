"""`ToolSession`: links a conversation to the data its tools keep for it."""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait

from tensordict import TensorDictBase

from llmrl._utils.failure import as_exception
from llmrl.data import Message
from llmrl.data.tensordicts import non_tensor, plain, tensordict_of

logger = logging.getLogger(__name__)

Release = Callable[[str], Future[None] | None]
"""Called with the id of a conversation that ends; a returned future is awaited."""
CLOSE_SECONDS = 30.0

STATE_KEY = "tool_state"
SESSION = (STATE_KEY, "session")
"""Key of a conversation's session in its TensorDict."""
OUTCOMES = ("answered", "failed", "timeouts", "invalid", "unknown", "malformed")
"""Outcomes of tool calls. `failed`: the tool raised; `timeouts`: it took too long; `invalid`: wrong arguments."""


class ToolSession:
    """A conversation's id, its tools' state, and callbacks for its end. Copies of the TensorDict share it.

    The callbacks run once: on `release`, which collectors call, or at the session's garbage collection.

    Example:
        >>> told = []
        >>> session = ToolSession()
        >>> session.on_release(told.append)
        >>> session.release(); session.release()
        >>> told == [session.id]
        True
    """

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex
        self.tool_names: set[str] = set()
        """Names of the tools of all transforms."""
        self.outcomes: Counter[str] = Counter()
        """Number of calls by outcome (`OUTCOMES`)."""
        self.states: dict[str, object] = {}
        """State that tools keep for the conversation, by name."""
        self.is_stopped = False
        """Whether a tool has ended the conversation."""
        self._releases: list[Release] = []
        self._finalizer = weakref.finalize(self, _release_all, self.id, self._releases)
        self._finalizer.atexit = False
        self._turn = -1
        self._claimed: set[Hashable] = set()
        self._answers: dict[int, list[Message]] = {}
        self._places: dict[int, tuple[int, Message]] = {}

    def on_release(self, release: Release) -> None:
        """Register a callback for the end of the conversation."""
        self._releases.append(release)

    def release(self) -> None:
        """Run the callbacks, and wait up to 30 s for the futures they return, except in an event loop."""
        closing = self._finalizer() or ()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            wait(closing, CLOSE_SECONDS)

    @property
    def is_released(self) -> bool:
        """Whether the callbacks have run."""
        return not self._finalizer.alive

    # Several transforms may answer a message: each answers its own calls, and one the unknown ones.

    def claim(self, turn: int, what: Hashable) -> bool:
        """Return whether the caller is the first to claim this call of the turn."""
        self._begin(turn)
        if what in self._claimed:
            return False
        self._claimed.add(what)
        return True

    def put_answers(self, turn: int, owner: int, messages: list[Message]) -> None:
        """Store a transform's answers until the turn's step."""
        self._begin(turn)
        self._answers[owner] = messages

    def take_answers(self, turn: int, owner: int) -> list[Message] | None:
        """Return the stored answers, also in a repeated step, or None."""
        self._begin(turn)
        return self._answers.get(owner)

    def put_place(self, message: Message, place: int) -> None:
        """Store the index of the call that an answer belongs to."""
        self._places[id(message)] = (place, message)

    def place_of(self, message: Message) -> int | None:
        """Return the index of the call that an answer belongs to, or None if unknown."""
        place, noted = self._places.get(id(message), (None, None))
        return place if noted is message else None

    def _begin(self, turn: int) -> None:
        if turn != self._turn:
            self._turn = turn
            self._claimed.clear()
            self._answers.clear()
            self._places.clear()

    def __deepcopy__(self, memo: object) -> ToolSession:
        return self

    def __copy__(self) -> ToolSession:
        return self

    def __reduce__(self) -> tuple[type[ToolSession], tuple[()]]:
        # A copy in another process has its own tools.
        return ToolSession, ()


def session_of(element: TensorDictBase) -> ToolSession | None:
    """Return a conversation's session; None if it has no tools."""
    return plain(element.get(SESSION, None))


def set_session(element: TensorDictBase, session: ToolSession) -> None:
    """Write a conversation's session."""
    element.set(STATE_KEY, tensordict_of({"session": non_tensor(session)}))


def outcomes_of(element: TensorDictBase) -> dict[str, int]:
    """Return the number of a conversation's tool calls by outcome (`OUTCOMES`)."""
    session = session_of(element)
    return {} if session is None else dict(session.outcomes)


def states_of(element: TensorDictBase) -> dict[str, object]:
    """Return the state that tools keep for a conversation, by name."""
    session = session_of(element)
    return {} if session is None else dict(session.states)


def _release_all(conversation_id: str, releases: list[Release]) -> list[Future[None]]:
    closing = []
    for release in releases:
        try:
            if (future := release(conversation_id)) is not None:
                closing.append(future)
        except BaseException as error:  # the other callbacks must run
            logger.warning("a tool failed to release a conversation", exc_info=as_exception(error))
    return closing
