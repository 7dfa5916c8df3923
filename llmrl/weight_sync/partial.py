"""Buffers held in part: each worker of a sharded model keeps only the pages that it loads from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import torch

PAGE_SIZE = 4096
"""Bytes per page."""


class NeededPages:
    """Pages of a flat buffer that loading reads; always includes the first page, which has the tag.

    A worker reads a block of a weight's rows, which is one piece, or of its columns, which is one piece per row.

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
        """Mark the pages of a strided region, with `offset` in bytes, and `size` and `stride` in elements."""
        if 0 in size:
            return
        # The innermost dimensions form contiguous pieces; the other dimensions enumerate the pieces.
        dims = sorted(zip(stride, size, strict=True))  # strides are never negative
        length = 1  # elements per piece
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
        """Bytes of the needed pages, all counted as whole."""
        return int(self._is_needed.sum()) * PAGE_SIZE

    @property
    def is_all(self) -> bool:
        """Whether all pages are needed."""
        return bool(self._is_needed.all())

    def new_buffer(self) -> torch.Tensor:
        """Return a buffer of the full size ([num_bytes] uint8) that uses memory only for written pages."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, self._size, flags=flags)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # huge pages would be allocated whole
        return torch.frombuffer(memory, dtype=torch.uint8)

    def keep(self, buffer: torch.Tensor, part: torch.Tensor, start: int) -> None:
        """Copy the needed pages of `part`, the bytes from `start` (a multiple of `PAGE_SIZE`), into a `new_buffer`."""
        stop = start + part.numel()
        for first, last in self._runs(start // PAGE_SIZE, -(-stop // PAGE_SIZE)):
            begin = first * PAGE_SIZE
            end = min(last * PAGE_SIZE, stop)
            buffer[begin:end] = part[begin - start : end - start]

    def _runs(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        marked = np.concatenate([[False], self._is_needed[first:last], [False]])
        edges = np.flatnonzero(marked[1:] != marked[:-1]) + first
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
