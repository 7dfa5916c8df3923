"""A gloo group of the trainer and one engine's workers: the way to engines on CPU on other hosts."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup

from llmrl.weight_sync.partial import NeededPages

CHUNK_SIZE = 1 << 26
"""Bytes broadcast at once."""
TIMEOUT = timedelta(seconds=120)
"""Of opening a group, and of each chunk. A peer that dies is noticed at once; this is for one that hangs."""


def open_group(address: str, port: int, *, rank: int, world_size: int) -> ProcessGroup:
    """Meet the others; rank 0 listens at `port`."""
    from llmrl.engines.vllm_private import stateless_init_torch_distributed_process_group

    return stateless_init_torch_distributed_process_group(
        address, port, rank=rank, world_size=world_size, backend="gloo", timeout=TIMEOUT
    )


def broadcast(group: ProcessGroup, buffer: torch.Tensor) -> None:
    """Broadcast rank 0's `buffer` ([num_bytes] uint8) into everyone's.

    Raises:
        RuntimeError: when a peer is gone.
    """
    for chunk in buffer.split(CHUNK_SIZE):
        _broadcast_chunk(group, chunk)


def receive_in_part(group: ProcessGroup, buffer: torch.Tensor, pages: NeededPages) -> None:
    """Take part in `broadcast`, and keep the pages that are needed in `buffer`, a `pages.new_buffer()`.

    Raises:
        RuntimeError: when a peer is gone.
    """
    chunk = torch.empty(min(CHUNK_SIZE, buffer.numel()), dtype=torch.uint8)
    for start in range(0, buffer.numel(), CHUNK_SIZE):
        part = chunk[: buffer.numel() - start]
        _broadcast_chunk(group, part)
        pages.keep(buffer, part, start)


def _broadcast_chunk(group: ProcessGroup, chunk: torch.Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, TIMEOUT
    group.broadcast([chunk], options).wait()


def close_group(group: ProcessGroup) -> None:
    """Leave; whoever waits for us gets an error."""
    group.shutdown()


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def own_address() -> str:
    """Return where other hosts reach this one; the loopback's address without a network."""
    from llmrl.engines.vllm_private import get_ip

    address = get_ip()
    return "127.0.0.1" if address == "0.0.0.0" else address
