"""`RecordedReplies`: the replies of a session, which later requests continue, name or reward."""

from __future__ import annotations

import re
from collections import defaultdict

from llmrl._utils.numbers import finite_number
from llmrl.data import Message
from llmrl.endpoint.requests import REFERENCES, ModelReply, ModelRequest, RefusedRequest
from llmrl.endpoint.tree import RecordedTurn, TurnTree


class RecordedReplies:
    """Recorded replies, by their ids or those of their items and calls, and their answers' rewards."""

    def __init__(self) -> None:
        # By reply id: the turns, the first answer and the number of instructions.
        self._said: dict[str, tuple[list[RecordedTurn], Message, int]] = {}
        self._called: dict[str, str] = {}  # reply ids by the ids of calls
        self._rewards: list[tuple[RecordedTurn, float]] = []

    def __contains__(self, name: str) -> bool:
        return _id_of(name) in self._said or _id_of(name) in self._called

    def add(self, reply: ModelReply, turns: list[RecordedTurn], num_instructions: int) -> None:
        """Add a reply, its turns, and the number of leading messages for its request only."""
        first = reply.answers[0]
        self._said[reply.reply_id] = (turns, first.message(), num_instructions)
        self._called.update((_id_of(call["id"]), reply.reply_id) for call in first.tool_calls)

    def with_earlier(self, request: ModelRequest) -> tuple[Message, ...]:
        """Return a request's messages with those of the earlier replies that it names.

        Raises RefusedRequest if a reply is unknown.
        """
        messages = tuple(self._named(message) for message in request.messages)
        if request.previous_id is None:
            return messages
        (turn, *_), answer, num_instructions = self._earlier(request.previous_id)
        count = request.num_instructions
        earlier = (*turn.conversation.messages[num_instructions:-1], answer)
        return (*messages[:count], *earlier, *messages[count:])

    def _named(self, message: Message) -> Message:
        """Return the answer that a message stands for, or the message itself."""
        if REFERENCES not in message:
            return message
        first, *others = [self._earlier(name)[1] for name in message[REFERENCES]]
        if any(other is not first for other in others):
            raise RefusedRequest("between items of different answers there must be a tool result or another message.")
        return first

    def _earlier(self, name: str) -> tuple[list[RecordedTurn], Message, int]:
        if name not in self:
            raise RefusedRequest(f"there is no earlier answer {name!r:.80} here.", status=404)
        return self._said[self._called.get(_id_of(name), _id_of(name))]

    def reward(self, reply_id: str, value: object, answer: int = 0) -> None:
        """Add a reward to an answer of a reply; thread-safe.

        Raises:
            RefusedRequest: if there is no such answer, or the value is not a finite number.
        """
        turns, *_ = self._said.get(_id_of(reply_id), ([],))
        if not 0 <= answer < len(turns):
            raise RefusedRequest(
                f"there is no recorded answer {answer} of a reply {reply_id!r:.80} to reward.", status=404
            )
        try:
            self._rewards.append((turns[answer], finite_number(value, "the reward")))
        except (TypeError, ValueError) as error:
            raise RefusedRequest(str(error)) from error

    def rewards_in(self, tree: TurnTree) -> dict[int, float]:
        """Return the sum of each answer's rewards, by its place in `TurnTree.places`."""
        places = tree.places()
        rewards: dict[int, float] = defaultdict(float)
        for turn, value in self._rewards:
            rewards[places[id(turn.node)]] += value
        return dict(rewards)


def _id_of(name: str) -> str:
    """Return the last part of the name of a reply, an item or a call: `chatcmpl-ID`, `fc_call_ID`."""
    return re.split("[-_]", name)[-1]


def continued(said: str, whole: str) -> str:
    """Return the whole text, beginning with the part that was sent; parsers strip outer white space."""
    if whole.startswith(said):
        return whole
    bare = said.lstrip()
    return said + whole.lstrip()[len(bare) :] if whole.lstrip().startswith(bare) else said
