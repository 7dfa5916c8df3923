"""Flat buffers of tensors, in memory that other processes of this host can map."""

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
"""Bytes to which each tensor is aligned: one cache line."""
HEADER_SIZE = 64
"""Bytes of the header, which holds the tag of the weights in the buffer."""

UNREACHABLE = "the worker cannot open the trainer's memory"
"""Start of the error message of a worker on another host, or of another user."""


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Positions of tensors in a flat buffer, or in a safetensors file.

    Example:
        >>> layout = PackedLayout.of([("a", torch.float32, (3,)), ("b", torch.bfloat16, (2, 2))])
        >>> [place.offset for place in layout.places], layout.num_bytes
        ([64, 128], 136)
    """

    places: tuple[TensorPlace, ...]
    num_bytes: int

    @classmethod
    def of(cls, entries: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> PackedLayout:
        """Lay out `(name, dtype, shape)` entries. Raises ValueError if there are none, or a name is repeated."""
        places: list[TensorPlace] = []
        names = set()
        end = HEADER_SIZE
        for name, dtype, shape in entries:
            if name in names:
                raise ValueError(f"the weight {name!r} occurs twice; names must be unique.")
            names.add(name)
            start = -(-end // ALIGNMENT) * ALIGNMENT
            places.append(TensorPlace(name, dtype, tuple(shape), start))
            end = start + torch.Size(shape).numel() * dtype.itemsize
        if not places:
            raise ValueError("there are no weights to send; register a model with parameters.")
        return cls(tuple(places), end)

    def views(self, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield `(name, tensor)` pairs, as views of `buffer` ([num_bytes] uint8)."""
        return ((place.name, place.view(buffer)) for place in self.places)

    @classmethod
    def from_plain(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> PackedLayout:
        """Return the layout that `to_plain` described."""
        dtypes = [getattr(torch, name) for name in dtype_names]
        return cls.of(zip(names, dtypes, shapes, strict=True))

    def to_plain(self) -> dict[str, list]:
        """Return the layout as lists that JSON and msgpack can represent."""
        return {
            "names": [place.name for place in self.places],
            "dtype_names": [str(place.dtype).removeprefix("torch.") for place in self.places],
            "shapes": [list(place.shape) for place in self.places],
        }


TAG_PLACE = TensorPlace("", torch.uint8, (HEADER_SIZE,), 0)
"""Position of the tag in a flat buffer."""


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
    """Return the CRC-32 of a buffer's bytes ([num_bytes] uint8)."""
    return zlib.crc32(memoryview(buffer.numpy()))  # type: ignore[arg-type]


class SharedBuffer:
    """A flat buffer that other processes of the same user on this host open by `path`.

    On Linux it is an anonymous file in memory, without the limit of `/dev/shm`; elsewhere it is a temporary file.

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
        """The bytes, `[num_bytes]` uint8. Raises RuntimeError after `close`."""
        if self._tensor is None:
            raise RuntimeError("the shared buffer is closed.")
        return self._tensor

    def close(self) -> None:
        """Free the memory. May be called twice."""
        self._tensor = None
        self._finalizer()


def open_shared(path: str, num_bytes: int) -> torch.Tensor:
    """Map another process's buffer, [num_bytes] uint8; writes to it stay private.

    Raises OSError if its owner is gone or on another host, and ValueError if it is shorter than `num_bytes`.
    """
    size = Path(path).stat().st_size
    if size < num_bytes:
        raise ValueError(f"the shared buffer {path} has {size} bytes, and {num_bytes} bytes were announced.")
    return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)


def _close(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        Path(path).unlink(missing_ok=True)
