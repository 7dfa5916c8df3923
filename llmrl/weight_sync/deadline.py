"""Timeouts of transfers: a communicator that aborts if a transfer stalls."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

TRANSFER_SECONDS = 120.0
"""Timeout of a transfer without progress; shorter if the engines' hang timeout requires it."""
_NUM_LOOKS = 20
"""Polls per timeout; polls are counted, not seconds, so that the time of a suspended process does not count."""


class TransferStalledError(RuntimeError):
    """Raised if a transfer was aborted because a peer died or hangs."""


class Communicator(Protocol):
    """Protocol of a communicator that broadcasts between GPUs: vLLM's `PyNcclCommunicator`."""

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Enqueue a broadcast."""

    def destroy(self) -> None:
        """Abort pending broadcasts, and leave."""


class TimedCommunicator:
    """Communicator that aborts a transfer with an error if no broadcast begins or ends within a timeout.

    NCCL waits forever for a peer that died or hangs. Trainer and workers both use this class, so all survivors return.
    """

    def __init__(self, communicator: Communicator, timeout_seconds: float) -> None:
        self._communicator = communicator
        self._timeout_seconds = timeout_seconds
        self._num_events = 0
        self._is_aborted = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Broadcast `tensor` from rank `src`. Raises TransferStalledError if the transfer was aborted."""
        self._require_whole()
        self._num_events += 1
        self._communicator.broadcast(tensor, src=src, stream=stream)
        self._num_events += 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a transfer within the context. Raises TransferStalledError if it was aborted."""
        is_over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(is_over,), daemon=True, name="llmrl-transfer-watch")
        watch.start()
        try:
            yield
        except Exception:
            self._require_whole()
            raise
        finally:
            is_over.set()
            watch.join()
        self._require_whole()

    def destroy(self) -> None:
        """Leave the group."""
        self._communicator.destroy()

    def _watch(self, is_over: threading.Event) -> None:
        num_before = self._num_events
        num_seen = self._num_events
        num_looks = 0
        while not is_over.wait(self._timeout_seconds / _NUM_LOOKS):
            num_looks = num_looks + 1 if num_before < num_seen == self._num_events else 0
            num_seen = self._num_events
            if num_looks >= _NUM_LOOKS:
                self._is_aborted = True
                self.destroy()
                return

    def _require_whole(self) -> None:
        if self._is_aborted:
            raise TransferStalledError(
                f"the transfer made no progress for {self._timeout_seconds:g} s and was ended: a peer died or hangs."
            )
