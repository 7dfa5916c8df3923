"""Buffers that are held in part: of a model that several workers share, each keeps what its own part is loaded from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

PAGE_SIZE = 4096
"""Bytes that are kept or not."""


class NeededPages:
    """Which pages of a flat buffer are read when its weights are loaded; the first, with the tag, always is.

    What a worker reads of a weight is a block of its rows, which lies in one piece, or a block of its columns, which
    lies in as many pieces as there are rows; where these are shorter than a page, it holds the whole weight.

    Args:
        num_bytes: size of the buffer.

    Example:
        >>> pages = NeededPages(10 * PAGE_SIZE)
        >>> pages.add(offset=5 * PAGE_SIZE, size=(2, 8), stride=(PAGE_SIZE, 1), itemsize=1)
        >>> pages.num_bytes // PAGE_SIZE, pages.is_all
        (3, False)
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._is_needed = np.zeros(-(-num_bytes // PAGE_SIZE), dtype=np.bool_)
        self._is_needed[:1] = True

    def add(self, *, offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int) -> None:
        """Mark what a strided region touches.

        Args:
            offset: offset of its first element, in bytes.
            size, stride: in elements.
            itemsize: bytes of an element.
        """
        if 0 in size:
            return
        dims = sorted(zip(stride, size, strict=True))  # strides are never negative
        length = 1  # of the pieces, in elements
        while dims and dims[0][0] <= length:
            step, count = dims.pop(0)
            length += step * (count - 1)
        starts = np.array([offset], dtype=np.int64)
        for step, count in dims:
            starts = (starts[:, None] + np.arange(count, dtype=np.int64) * step * itemsize).reshape(-1)
        first = starts // PAGE_SIZE
        last = (starts + length * itemsize - 1) // PAGE_SIZE
        if len(starts) == 1:
            self._is_needed[first[0] : last[0] + 1] = True
            return
        for place in range(int((last - first).max()) + 1):
            self._is_needed[np.minimum(first + place, last)] = True

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that are needed, the last one counted whole."""
        return int(self._is_needed.sum()) * PAGE_SIZE

    @property
    def is_all(self) -> bool:
        """Whether there is no page that is not needed."""
        return bool(self._is_needed.all())

    def new_buffer(self) -> torch.Tensor:
        """Return a buffer ([num_bytes] uint8) as large as the whole, with memory only where it is written to."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, self._size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would be there whole
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keep(self, buffer: torch.Tensor, part: torch.Tensor, start: int) -> None:
        """Copy into a `new_buffer` what is needed of a part.

        Args:
            buffer: [num_bytes] uint8.
            part: [num_part_bytes] uint8, the bytes from `start` on.
            start: a multiple of `PAGE_SIZE`.
        """
        for first, last in self._runs(start // PAGE_SIZE, -(-(start + part.numel()) // PAGE_SIZE)):
            begin = first * PAGE_SIZE
            end = min(last * PAGE_SIZE, start + part.numel())
            buffer[begin:end] = part[begin - start : end - start]

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Return begin and end of each run of needed pages between two."""
        marked = np.concatenate([[False], self._is_needed[first:last], [False]])
        edges = np.flatnonzero(marked[1:] != marked[:-1]) + first
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
