"""The events of a streamed reply, common to all dialects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

from llmrl.endpoint.requests import ModelReply, ModelRequest
from llmrl.rendering.tool_calls import Json

Event = tuple[str | None, Json]
"""Name, or None, and data."""
Part = Literal["reasoning", "content"]
_PARTS: tuple[Part, Part] = ("reasoning", "content")


class ReplyStream(ABC):
    """Events of a streamed reply: text of its answers while they are sampled, then what remains.

    Args:
        head: the reply without its answers.
        request: the request.
    """

    def __init__(self, head: ModelReply, request: ModelRequest) -> None:
        self.head = head
        self.request = request
        self._is_begun = False
        self._num_said: defaultdict[tuple[int, Part], int] = defaultdict(int)

    def say(self, answers: Sequence[tuple[str, str]]) -> Iterator[Event]:
        """Yield the events of what is new in the reasoning and content of each answer."""
        for index, texts in enumerate(answers):
            for part, text in zip(_PARTS, texts, strict=True):
                if len(text) > (num_said := self._num_said[index, part]):
                    yield from self._begin_once()
                    self._num_said[index, part] = len(text)
                    yield from self.delta(index, part, text[num_said:])

    def end(self, reply: ModelReply) -> Iterator[Event]:
        """Yield the remaining events of a reply; its answers begin with the text that was sent."""
        self.head = reply
        yield from self._begin_once()
        yield from self.say([(answer.reasoning, answer.content) for answer in reply.answers])
        yield from self.finish(reply)

    def _begin_once(self) -> Iterator[Event]:
        if not self._is_begun:
            self._is_begun = True
            yield from self.begin()

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before all answers."""

    @abstractmethod
    def delta(self, index: int, part: Part, text: str) -> Iterator[Event]:
        """Yield the events of more text of an answer."""

    @abstractmethod
    def finish(self, reply: ModelReply) -> Iterator[Event]:
        """Yield the events after the text of all answers: calls, ends and counts."""
