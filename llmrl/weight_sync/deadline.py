"""Transfers that end: a communicator that is aborted when nothing goes on any more."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch

TRANSFER_SECONDS = 120.0
"""Without progress, after which a transfer is given up, unless engines are taken to hang sooner."""
_NUM_LOOKS = 20
"""Looks within the timeout. Looks are counted, not seconds: a process that was stopped must not blame its peers."""


class TransferStalledError(RuntimeError):
    """A transfer was ended: a peer died, or stands still."""


class Communicator(Protocol):
    """What broadcasts between GPUs: vLLM's `PyNcclCommunicator`."""

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Ask for a broadcast; it may be done later."""
        ...

    def destroy(self) -> None:
        """Abort what was asked for, and leave."""
        ...


class TimedCommunicator:
    """A communicator that ends its transfers, with an error, when no broadcast begins or ends for some time.

    NCCL waits for ever for a peer that died or stands still. Both ends of a transfer have this, so that the trainer and
    the workers that live all come back from it.

    Args:
        communicator: communicator to watch.
        timeout_seconds: without progress.
    """

    def __init__(self, communicator: Communicator, timeout_seconds: float) -> None:
        self._communicator = communicator
        self._timeout_seconds = timeout_seconds
        self._num_events = 0
        self._is_aborted = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: torch.cuda.Stream | None = None) -> None:
        """Broadcast `tensor` from rank `src`. Raises TransferStalledError if the transfer was ended."""
        self._require_whole()
        self._num_events += 1
        self._communicator.broadcast(tensor, src=src, stream=stream)
        self._num_events += 1

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a transfer, from its first broadcast to its last byte. Raises TransferStalledError if it was ended."""
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
        """Leave."""
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
