"""Filling a replay buffer in the background."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

logger = logging.getLogger("llmrl")


class BufferFiller:
    """A thread that asks for batches and extends a replay buffer with them until there are none.

    Args:
        next_batch: gives the next batch; None at the end.
        replay_buffer: anything with `extend`.

    Example:
        >>> class Buffer(list):
        ...     pass
        >>> buffer, batches = Buffer(), iter([[1, 2], [3]])
        >>> filler = BufferFiller(lambda: next(batches, None), buffer)
        >>> filler.start(); filler.join(); list(buffer)
        [1, 2, 3]
    """

    def __init__(self, next_batch: Callable[[], Any], replay_buffer: Any) -> None:
        self._next_batch, self._replay_buffer = next_batch, replay_buffer
        self.lock = threading.Lock()
        """Held while the buffer is written."""
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin.

        Raises:
            RuntimeError: when it runs already.
        """
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the collector fills its buffer already.")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._fill, name="llmrl-buffer", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            while not self._is_stopping and (batch := self._next_batch()) is not None:
                with self.lock:
                    self._replay_buffer.extend(batch)
        except CancelledError:
            return
        except Exception as error:
            logger.error("filling the replay buffer ended: %s", error)
            self._error = error

    def is_running(self) -> bool:
        """Whether the thread runs.

        Raises:
            Exception: whatever ended it, once.
        """
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self) -> None:
        """End after the batch at hand."""
        self._is_stopping = True
        self.join(timeout=10)
