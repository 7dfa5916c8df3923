"""Tensors side by side in one flat buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

ALIGNMENT = 64
"""Bytes: each tensor starts on its own cache line."""
HEADER_SIZE = 64
"""Bytes before the first tensor; they hold the tag that says which weights the buffer holds."""


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
        names, dtypes, shapes, offsets = [], [], [], []
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
        """Each `(name, tensor)` as a view of `buffer` ([num_bytes] uint8)."""
        for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            yield name, buffer[offset : offset + size].view(dtype).view(shape)

    @classmethod
    def from_plain(
        cls, names: Sequence[str], dtype_names: Sequence[str], shapes: Sequence[Sequence[int]]
    ) -> PackedLayout:
        """The layout that `to_plain` described.

        Example:
            >>> layout = PackedLayout.of([("a", torch.float32, (3,))])
            >>> PackedLayout.from_plain(**layout.to_plain()) == layout
            True
        """
        dtypes = [getattr(torch, name) for name in dtype_names]
        return cls.of(zip(names, dtypes, shapes, strict=True))

    def to_plain(self) -> dict[str, list]:
        """As lists that travel through JSON or msgpack."""
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
    """The tag in the header.

    Example:
        >>> buffer = torch.zeros(64, dtype=torch.uint8)
        >>> write_tag(buffer, "version 1")
        >>> read_tag(buffer)
        'version 1'
    """
    return bytes(buffer[:HEADER_SIZE].tolist()).rstrip(b"\0").decode("ascii", errors="replace")
