"""Flat buffers of bytes: tensors side by side, in memory that another process of this host can map."""

from __future__ import annotations

import os
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from llmrl._utils.safetensors_file import TensorPlace

ALIGNMENT = 64
"""Bytes: each tensor starts on its own cache line."""
HEADER_SIZE = 64
"""Bytes before the first tensor; they hold the tag that says which weights the buffer holds."""

UNREACHABLE = "the worker cannot open the trainer's memory"
"""How the refusal of a worker starts that runs on another host, or as another user."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Where each tensor lies in a flat buffer.

    Example:
        >>> layout = PackedLayout.of([("a", torch.float32, (3,)), ("b", torch.bfloat16, (2, 2))])
        >>> layout.offsets, layout.num_bytes
        ((64, 128), 136)
    """

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    """In bytes."""
    num_bytes: int

    @classmethod
    def of(cls, entries: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> PackedLayout:
        """Lay out `(name, dtype, shape)` entries in their order.

        Raises:
            ValueError: when there are none, or a name comes twice.
        """
        names = []
        dtypes = []
        shapes = []
        offsets = []
        end = HEADER_SIZE
        for name, dtype, shape in entries:
            start = -(-end // ALIGNMENT) * ALIGNMENT
            names.append(name)
            dtypes.append(dtype)
            shapes.append(tuple(shape))
            offsets.append(start)
            end = start + torch.Size(shape).numel() * dtype.itemsize
        if not names:
            raise ValueError("there are no weights to send; register a model with parameters.")
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the weight {twice!r} comes twice; names must be unique.")
        return cls(tuple(names), tuple(dtypes), tuple(shapes), tuple(offsets), end)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Return each `(name, tensor)` as a view of `buffer` ([num_bytes] uint8)."""
        for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            yield name, buffer[offset : offset + size].view(dtype).view(shape)

    def places(self) -> list[TensorPlace]:
        """Return where the tag and each weight lie; the tag has no name."""
        weights = zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True)
        return [TensorPlace("", torch.uint8, (HEADER_SIZE,), 0), *(TensorPlace(*place) for place in weights)]

    @classmethod
    def from_plain(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> PackedLayout:
        """Return the layout that `to_plain` described.

        Example:
            >>> layout = PackedLayout.of([("a", torch.float32, (3,))])
            >>> PackedLayout.from_plain(**layout.to_plain()) == layout
            True
        """
        dtypes = [getattr(torch, name) for name in dtype_names]
        return cls.of(zip(names, dtypes, shapes, strict=True))

    def to_plain(self) -> dict[str, list]:
        """Return it as lists that travel through JSON or msgpack."""
        return {
            "names": list(self.names),
            "dtype_names": [str(dtype).removeprefix("torch.") for dtype in self.dtypes],
            "shapes": [list(shape) for shape in self.shapes],
        }


def write_tag(buffer: torch.Tensor, tag: str) -> None:
    """Write up to 64 ASCII characters into the header."""
    data = tag.encode("ascii").ljust(HEADER_SIZE, b"\0")
    buffer[:HEADER_SIZE] = torch.frombuffer(bytearray(data), dtype=torch.uint8)


def read_tag(buffer: torch.Tensor) -> str:
    """Return the tag in the header.

    Example:
        >>> buffer = torch.zeros(64, dtype=torch.uint8)
        >>> write_tag(buffer, "version 1")
        >>> read_tag(buffer)
        'version 1'
    """
    return bytes(buffer[:HEADER_SIZE].tolist()).rstrip(b"\0").decode("ascii", errors="replace")


def checksum_of(buffer: torch.Tensor) -> int:
    """Return the CRC-32 of a buffer's bytes ([num_bytes] uint8).

    Example:
        >>> checksum_of(torch.zeros(2, dtype=torch.uint8))
        1104745215
    """
    return zlib.crc32(memoryview(buffer.numpy()))  # type: ignore[arg-type]


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
        self._tensor: torch.Tensor | None = torch.from_file(self.path, shared=True, size=num_bytes, dtype=torch.uint8)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, `[num_bytes]` of uint8.

        Raises:
            RuntimeError: after `close`.
        """
        if self._tensor is None:
            raise RuntimeError("the shared buffer is closed.")
        return self._tensor

    def close(self) -> None:
        """Give the memory back. May be called twice."""
        self._tensor = None
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
