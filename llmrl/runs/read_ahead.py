"""`ReadAhead`: draws the items of an iterator in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class ReadAhead(Generic[Item]):
    """Draws items in the background; at most one waits in the queue.

    Example:
        >>> ahead = ReadAhead(iter("ab"))
        >>> ahead.take(wait=True), ahead.take(wait=True), ahead.take(wait=True)
        ('a', 'b', None)
        >>> ahead.is_at_end
        True
    """

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items
        self._drawn: queue.Queue[Item | Exception | None] = queue.Queue(maxsize=1)
        self._is_closed = threading.Event()
        self.is_at_end = False
        """Whether all items have been taken."""
        self._thread = threading.Thread(target=self._draw, name="llmrl-read-ahead", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> Item | None:
        """Return the next item, or None at the end, or if no item is ready and `wait` is false.

        Raises the exception of the iterator, if it failed.
        """
        if self.is_at_end:
            return None
        try:
            item = self._drawn.get(block=wait)
        except queue.Empty:
            return None
        if isinstance(item, Exception):
            self.is_at_end = True
            raise item
        self.is_at_end = item is None
        return item

    def close(self) -> None:
        """Stop drawing, and discard the pending item without waiting for it."""
        self._is_closed.set()

    def _draw(self) -> None:
        try:
            for item in self._items:
                self._put(item)
                if self._is_closed.is_set():
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Item | Exception | None) -> None:
        while not self._is_closed.is_set():
            with contextlib.suppress(queue.Full):
                return self._drawn.put(item, timeout=0.1)
