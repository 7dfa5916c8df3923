"""Memory that another process of this host can map, and that goes when its owner goes."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import torch

UNREACHABLE = "the worker cannot open the trainer's memory"
"""How the refusal of a worker starts that runs on another host, or as another user."""


class SharedBuffer:
    """A flat buffer of bytes that other processes of the same user on this host open by `path`.

    On Linux it is an anonymous file in memory: neither the size of `/dev/shm` bounds it nor does a killed process
    leave it behind. Elsewhere it is a temporary file.

    Example:
        >>> shared = SharedBuffer(128)
        >>> shared.tensor[:2] = torch.tensor([1, 2], dtype=torch.uint8)
        >>> open_shared(shared.path, 128)[:2].tolist()
        [1, 2]
        >>> shared.close()
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("llmrl-weights", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._finalizer = weakref.finalize(self, _close, descriptor, None)
        else:
            descriptor, self.path = tempfile.mkstemp(prefix="llmrl-weights-")
            self._finalizer = weakref.finalize(self, _close, descriptor, self.path)
        os.ftruncate(descriptor, num_bytes)
        self.tensor: torch.Tensor | None = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)
        """[num_bytes] uint8"""

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self.tensor = None
        self._finalizer()


def open_shared(path: str, num_bytes: int) -> torch.Tensor:
    """Map a buffer of another process for reading: [num_bytes] uint8, writes to which stay private.

    Raises:
        OSError: when it cannot be opened, because its owner is gone or on another host.
        ValueError: when it is shorter than `num_bytes`.
    """
    size = Path(path).stat().st_size
    if size < num_bytes:
        raise ValueError(f"the shared buffer {path} has {size} bytes and {num_bytes} were announced.")
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def _close(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        Path(path).unlink(missing_ok=True)
