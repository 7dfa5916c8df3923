"""Destinations of batches that are collected in the background: a replay buffer or a queue."""

from __future__ import annotations

import contextlib
import logging
import queue as queues
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Protocol, TypeVar

from tensordict import TensorDictBase

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.2

Batch = TypeVar("Batch")


class TakesBatches(Protocol):
    """Interface of a replay buffer that a collector fills."""

    def extend(self, batch: TensorDictBase, /) -> object:
        """Add a batch, and return the indices of its elements, if any."""


class TakesItems(Protocol):
    """Interface of a queue between threads, processes or Ray actors."""

    def put(self, item: TensorDictBase, /, *, timeout: float) -> object:
        """Add an item, or raise `queue.Full` after `timeout` seconds."""


class BufferFiller:
    """Thread that requests batches and writes them until there are no more.

    Args:
        next_batch: function that returns the next batch, or None at the end.
        write: function that stores a batch, such as a replay buffer's `extend`.

    Example:
        >>> buffer, batches = [], iter([[1, 2], [3]])
        >>> filler = BufferFiller(lambda: next(batches, None), buffer.extend)
        >>> filler.start(); filler.join(); buffer
        [1, 2, 3]
    """

    def __init__(self, next_batch: Callable[[], Batch | None], write: Callable[[Batch], object]) -> None:
        self._next_batch = next_batch
        self._write = write
        self.lock = threading.RLock()
        """Held while a batch is written."""
        self._is_stopping = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; raise RuntimeError if it is running."""
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("the collector is already filling its buffer.")
        self._is_stopping = False
        self._thread = threading.Thread(target=self._fill, name="llmrl-buffer", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        try:
            while not self._is_stopping and (batch := self._next_batch()) is not None:
                with self.lock:
                    self._write(batch)
        except CancelledError:
            return
        except Exception as error:
            logger.error("the replay buffer is no longer filled: %s", error)
            self._error = error

    def is_running(self) -> bool:
        """Return whether the thread is running; raise the error that ended it, once."""
        if self._error is not None:
            error = self._error
            self._error = None
            raise error
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread ends, at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)

    def stop(self, timeout: float | None = None) -> None:
        """End after the current batch, and wait at most `timeout` seconds for it."""
        self._is_stopping = True
        self.join(timeout)


class QueueBuffer:
    """Adapter that gives a queue a replay buffer's `extend`: each element of a batch is one item.

    `extend` waits while the queue is full. Raises TypeError if the queue has no `put(item, timeout=)`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> items = queues.Queue()
        >>> QueueBuffer(items).extend(TensorDict({"a": torch.arange(2)}, [2]))
        >>> items.qsize()
        2
    """

    def __init__(self, queue: TakesItems) -> None:
        if not callable(getattr(queue, "put", None)):
            raise TypeError(f"queue must have put(item, timeout=), as queue.Queue has; got {type(queue).__name__}.")
        self._queue = queue
        self._is_closed = False

    def extend(self, batch: TensorDictBase) -> None:
        """Put all elements of a batch into the queue; raise CancelledError after `close`."""
        for item in batch.unbind(0):
            self._put(item)

    def _put(self, item: TensorDictBase) -> None:
        while not self._is_closed:
            with contextlib.suppress(queues.Full):  # Ray's exception is a subclass
                self._queue.put(item, timeout=_WAIT_SECONDS)
                return
        raise CancelledError

    def close(self) -> None:
        """Stop waiting for space in the queue."""
        self._is_closed = True
