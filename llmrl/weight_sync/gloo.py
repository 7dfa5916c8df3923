"""A gloo group of the trainer and one engine's workers, for CPU engines on other hosts."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from llmrl.weight_sync.buffers import checksum_of
from llmrl.weight_sync.deltas import Delta
from llmrl.weight_sync.partial import NeededPages

CHUNK_SIZE = 1 << 26
"""Bytes per broadcast."""
TIMEOUT = timedelta(seconds=120)
"""Timeout of opening a group and of each chunk, for peers that hang; a peer's death is noticed at once."""
NOT_FOLLOWED = "the delta does not lead to the weights that were announced"
"""Start of the error message of a worker that needs all weights."""


def open_group(address: str, port: int, *, rank: int, world_size: int) -> ProcessGroupGloo:
    """Open the group; rank 0 listens at `port`."""
    # vLLM's function is not used: it redirects stdout meanwhile, and permanently if two calls overlap.
    store = TCPStore(address, port, world_size, is_master=rank == 0, timeout=TIMEOUT, wait_for_workers=False)
    return ProcessGroupGloo(PrefixStore("llmrl", store), rank, world_size, timeout=TIMEOUT)


def broadcast(group: ProcessGroupGloo, buffer: torch.Tensor) -> None:
    """Broadcast rank 0's `buffer` ([num_bytes] uint8) to all ranks. Raises RuntimeError if a peer is gone."""
    for chunk in buffer.split(CHUNK_SIZE):
        _broadcast_chunk(group, chunk)


class Receiver:
    """A worker's end of a group, with the buffer that broadcasts fill and deltas change."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group = group
        self._buffer: torch.Tensor | None = None
        self._checksum: int | None = None
        """Checksum of the buffer, if a delta may follow."""

    def receive(self, num_bytes: int, *, pages: NeededPages | None, checksum: int | None) -> torch.Tensor:
        """Receive all weights; return the buffer ([num_bytes] uint8), which the next call overwrites.

        Args:
            pages: pages to keep; None keeps all.
            checksum: CRC-32 of the buffer, if deltas may follow; all pages are then kept and checked.

        Raises RuntimeError if a peer is gone, and ValueError if the checksum differs.
        """
        self._checksum = None
        if checksum is not None:
            pages = None
        if self._buffer is None or self._buffer.numel() != num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8) if pages is None else pages.new_buffer()
        if pages is None:
            broadcast(self._group, self._buffer)
        else:
            self._receive_in_part(self._buffer, pages)
        if checksum is not None and checksum_of(self._buffer) != checksum:
            raise ValueError("the received weights differ from those that were sent: the checksum differs.")
        self._checksum = checksum
        return self._buffer

    def receive_delta(self, num_delta_bytes: int) -> torch.Tensor:
        """Receive a delta, and return the previous buffer ([num_bytes] uint8) with the delta applied.

        Raises RuntimeError if a peer is gone, and ValueError if the delta does not apply; all
        weights must then be sent.
        """
        data = torch.empty(num_delta_bytes, dtype=torch.uint8)
        broadcast(self._group, data)
        base = self._checksum
        self._checksum = None
        try:
            delta = Delta.from_bytes(data.numpy().tobytes())
            if self._buffer is None or base is None or delta.base_checksum != base:
                raise ValueError("it applies to other weights.")
            delta.apply(self._buffer)
            if checksum_of(self._buffer) != delta.checksum:
                raise ValueError("the checksum differs.")
        except ValueError as error:
            raise ValueError(f"{NOT_FOLLOWED}: {error}") from error
        self._checksum = delta.checksum
        return self._buffer

    def close(self) -> None:
        """Leave the group, so that peers that wait for this process get an error, and free the buffer."""
        self._group.shutdown()
        self._buffer = self._checksum = None

    def _receive_in_part(self, buffer: torch.Tensor, pages: NeededPages) -> None:
        chunk = torch.empty(min(CHUNK_SIZE, buffer.numel()), dtype=torch.uint8)
        for start in range(0, buffer.numel(), CHUNK_SIZE):
            part = chunk[: buffer.numel() - start]
            _broadcast_chunk(self._group, part)
            pages.keep(buffer, part, start)


def _broadcast_chunk(group: ProcessGroupGloo, chunk: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = TIMEOUT
    group.broadcast([chunk], options).wait()  # type: ignore[attr-defined]  # of the base class


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def own_address() -> str:
    """Return this host's address in the network, or the loopback address without a network."""
    from llmrl.engines.vllm.private import get_ip

    address = get_ip()
    return "127.0.0.1" if address == "0.0.0.0" else address
