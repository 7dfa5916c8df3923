"""`TokenStream`: the tokens of a request while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from llmrl._utils.background_loop import mailbox_of


class TokenStream:
    """The tokens of one request while an engine samples them, and a way to end it early; bound to one loop.

    Args:
        on_news: function that is called on the loop when there are more tokens.

    Example:
        >>> async def main():
        ...     stream = TokenStream(lambda: None)
        ...     stream.report([1, 2])
        ...     return stream.token_ids
        >>> asyncio.run(main())
        [1, 2]
    """

    def __init__(self, on_news: Callable[[], None]) -> None:
        self.token_ids: list[int] = []
        """[num_tokens] tokens so far; the list starts anew if the request is retried."""
        self.before: list[int] = []
        """[num_before] earlier tokens of the completion, if the request continues one."""
        self.is_stopped = False
        """Whether the engine must end the request, with finish reason `abort`."""
        self._on_news = on_news
        self._mailbox = mailbox_of(asyncio.get_running_loop())
        self._is_announced = False

    def report(self, token_ids: list[int]) -> None:
        """Set the tokens that the engine has sampled so far; may be called from any thread."""
        self.token_ids = self.before + token_ids if self.before else token_ids
        if not self._is_announced:  # one pending announcement covers all reports until the reader runs
            self._is_announced = True
            self._mailbox.post(self._announce)

    def _announce(self) -> None:
        self._is_announced = False
        self._on_news()


@runtime_checkable
class StreamsTokens(Protocol):
    """An engine with `generate(..., stream=)`, which reports to a `TokenStream` and obeys its `is_stopped`."""

    streams_tokens: bool
    """Whether the engine reports tokens; for several engines, whether all of them do."""


def is_streaming(engine: object) -> bool:
    """Return whether an engine reports tokens while it samples them."""
    return isinstance(engine, StreamsTokens) and engine.streams_tokens
