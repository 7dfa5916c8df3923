"""`ToolSession`: what ties a conversation to what its tools keep for it."""

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
from llmrl.data.tensordicts import plain

logger = logging.getLogger("llmrl")

Release = Callable[[str], Future[None] | None]
"""Called with the id of a conversation that ends; an awaitable that it returns is awaited beside the others."""
CLOSE_SECONDS = 30.0

STATE_KEY = "tool_state"
SESSION = (STATE_KEY, "session")
"""Where a conversation's session is in its TensorDict."""
OUTCOMES = ("answered", "failed", "timeouts", "invalid", "unknown", "malformed")
"""How a tool call ends: of the failed ones the tool raised, `timeouts` took too long, `invalid` are the arguments."""


class ToolSession:
    """One conversation, as its tools know it: an id, and who is to be told when it ends.

    It rides in the TensorDict, where every copy of it is itself. Tools learn it once: by `release`, which a collector
    calls however a rollout ended, or when nothing refers to the conversation any more.

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
        """Calls by outcome, see `OUTCOMES`."""
        self.states: dict[str, object] = {}
        """What tools with a memory keep for the conversation, by name."""
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
        """Have a function called with the id when the conversation ends."""
        self._releases.append(release)

    def release(self) -> None:
        """Tell the tools that the conversation has ended, and wait for what they close, 30 s at most.

        In an event loop, which may be the one that closes, nothing is waited for.
        """
        closing = self._finalizer() or ()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            wait(closing, CLOSE_SECONDS)

    @property
    def is_released(self) -> bool:
        """Whether the tools have been told."""
        return not self._finalizer.alive

    # Several transforms may answer one message: each takes its own calls, and exactly one takes the unknown ones.

    def claim(self, turn: int, what: Hashable) -> bool:
        """Return whether the caller is the first to answer this of the turn's calls."""
        self._begin(turn)
        if what in self._claimed:
            return False
        self._claimed.add(what)
        return True

    def put_answers(self, turn: int, owner: int, messages: list[Message]) -> None:
        """Keep what a transform answers until the turn's step."""
        self._begin(turn)
        self._answers[owner] = messages

    def take_answers(self, turn: int, owner: int) -> list[Message] | None:
        """Return what `put_answers` kept, in a step that is repeated, too; None when nothing was."""
        self._begin(turn)
        return self._answers.get(owner)

    def put_place(self, message: Message, place: int) -> None:
        """Note which of the turn's calls an answer is to."""
        self._places[id(message)] = (place, message)

    def place_of(self, message: Message) -> int | None:
        """Return which of the turn's calls an answer is to; None where that is not known."""
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
        # Elsewhere the conversation goes on with tools of its own.
        return ToolSession, ()


def outcomes_of(element: TensorDictBase) -> dict[str, int]:
    """Return a conversation's tool calls by outcome, see `OUTCOMES`; none where there are no tools."""
    session = plain(element.get(SESSION, None))
    return {} if session is None else dict(session.outcomes)


def states_of(element: TensorDictBase) -> dict[str, object]:
    """Return what tools with a memory keep for a conversation, by name."""
    session = plain(element.get(SESSION, None))
    return {} if session is None else dict(session.states)


def _release_all(conversation_id: str, releases: list[Release]) -> list[Future[None]]:
    closing = []
    for release in releases:
        try:
            if (future := release(conversation_id)) is not None:
                closing.append(future)
        except BaseException as error:  # the other tools are to be told, too
            logger.warning("a tool failed to let go of a conversation", exc_info=as_exception(error))
    return closing
