"""A double buffer of weight files, with deltas since the last whole file and a pointer."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from io import FileIO
from pathlib import Path

import torch

from llmrl._utils.arguments import check_least
from llmrl._utils.files import flush_to_disk, write_atomically
from llmrl._utils.safetensors_file import places_of, write_safetensors
from llmrl.weight_sync.buffers import PackedLayout, checksum_of
from llmrl.weight_sync.deltas import Delta, DeltaWriter
from llmrl.weight_sync.partial import NeededPages
from llmrl.weight_sync.source import ModelWeights

POINTER_NAME = "current.json"
DELTA_FOLDER = "deltas"
FILE_NAME = "model.safetensors"
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class BufferPointer:
    """Reference to the current weights of a double buffer."""

    slot: int
    """Buffer with the whole file: 0 or 1."""
    serial: int
    """Number of the write, from 1."""
    version: int
    """Policy version of the weights."""
    num_bytes: int
    checksum: int
    """CRC-32 of the weights' file, after applying any deltas."""
    anchor_serial: int
    """Serial of the write that made the whole file in the buffer, to which deltas apply."""
    anchor_checksum: int
    anchor_every: int = 1
    """Maximum number of writes that share a file; 1 means no deltas."""


_BEFORE_THE_FIRST = BufferPointer(
    slot=1, serial=0, version=0, num_bytes=0, checksum=0, anchor_serial=0, anchor_checksum=0
)
"""Pointer that a first write follows."""


class DoubleBuffer:
    """Weights on a file system, written next to the current ones, which stay whole until the pointer moves.

    Readers get whole weights or an error, even if the writer was killed. Each of the two buffers is
    a folder with one safetensors file. With `anchor_every` above 1, most writes are *deltas* from
    the previous write, starting from the file in the buffer, the *anchor*. The checksum is that of
    the resulting file, which is identical to the file that a whole write would make.

    Args:
        folder: folder of the files.
        anchor_every: number of writes of which the first writes a whole file; a process also writes a whole file if
            it did not make the last write. Above 1, a copy of the file is kept in memory.

    Raises ValueError if `anchor_every` is below 1.

    Example:
        >>> import tempfile
        >>> buffer = DoubleBuffer(tempfile.mkdtemp())
        >>> buffer.write({"weight": torch.ones(2)}).serial
        1
        >>> buffer.read(buffer.pointer()).tensors()["weight"]
        tensor([1., 1.])
    """

    def __init__(self, folder: str | os.PathLike[str], *, anchor_every: int = 1) -> None:
        check_least(1, anchor_every=anchor_every)
        self.folder = Path(folder)
        self._anchor_every = anchor_every
        self._written: FileWeights | None = None

    def pointer(self) -> BufferPointer | None:
        """Return the current pointer; `None` before the first write. Raises ValueError if its file is damaged."""
        path = self.folder / POINTER_NAME
        try:
            return BufferPointer(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"the pointer {path} is damaged: {error}") from error

    def write(self, weights: ModelWeights | Mapping[str, torch.Tensor], version: int | None = None) -> BufferPointer:
        """Write into the buffer that is not current, and move the pointer to it; `version` is by default the next.

        Raises ValueError if a source yields other weights than it announced.
        """
        current = self.pointer() or _BEFORE_THE_FIRST
        source = ModelWeights(weights) if isinstance(weights, Mapping) else weights
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only the owner may read the weights
        if version is None:
            version = current.version + 1
        serial = current.serial + 1
        pointer = self._write_delta(current, source, version)
        # A whole file is due without a delta, or if the delta is too large or too far from its anchor.
        if pointer is None or pointer.serial - pointer.anchor_serial >= self._anchor_every:
            whole = self._written
            self._written = None
            slot = 1 - current.slot
            path = self._cleared(slot, current)
            if pointer is None or whole is None:
                self.delta_path(serial).unlink(missing_ok=True)  # a write that was rolled back may have left it
                num_bytes, checksum = write_safetensors(path, source.metadata(), source)
            else:
                num_bytes = whole.buffer.numel()
                checksum = pointer.checksum
                path.write_bytes(memoryview(whole.buffer.numpy()))  # type: ignore[arg-type]
                flush_to_disk(path)
            pointer = BufferPointer(slot, serial, version, num_bytes, checksum, serial, checksum, self._anchor_every)
            if self._anchor_every > 1:
                self._written = whole or self.read(pointer)
        if self._written is not None:
            self._written = replace(self._written, pointer=pointer)
        self.point_to(pointer)
        return pointer

    def _cleared(self, slot: int, current: BufferPointer) -> Path:
        """Empty a buffer's folder, delete deltas that `current` does not need, and return the buffer's file."""
        path = self.path(slot)
        path.parent.mkdir(exist_ok=True)
        for stale in path.parent.iterdir():  # old weights, and remains of killed writers
            stale.unlink()
        for stale in self.folder.glob(f"{DELTA_FOLDER}/*"):
            serial = stale.name.removesuffix(".delta")
            if not serial.isdecimal() or int(serial) <= current.anchor_serial:
                stale.unlink()
        return path

    def _write_delta(self, current: BufferPointer, source: ModelWeights, version: int) -> BufferPointer | None:
        """Write the changes since `current`; None, as is `_written`, if this process does not know these weights."""
        written = self._written
        if written is None or written.pointer != current or not written.has_layout_of(source):
            self._written = None
            return None
        self._written = None  # the buffer is a mixture until all tensors are put
        writer = DeltaWriter(written.buffer, places_of(written.buffer))
        for name, tensor in source:
            writer.put(name, tensor)
        checksum = checksum_of(written.buffer)
        delta = writer.finish(current.serial + 1, current.checksum, checksum)
        self._written = written
        path = self.delta_path(current.serial + 1)
        if delta is None:
            path.unlink(missing_ok=True)
            anchor = current.serial + 1 - self._anchor_every  # so old that `write` writes a whole file
        else:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_atomically(path, lambda temporary: temporary.write_bytes(delta))
            anchor = current.anchor_serial
        return replace(
            current, serial=current.serial + 1, version=version, checksum=checksum, anchor_serial=anchor,
            anchor_every=self._anchor_every,
        )  # fmt: skip

    def point_to(self, pointer: BufferPointer | None) -> None:
        """Move the pointer atomically; `None` deletes it."""
        path = self.folder / POINTER_NAME
        if pointer is None:
            path.unlink(missing_ok=True)
            return
        # A fixed name, so that killed writers leave at most one file.
        part = self.folder / f"{POINTER_NAME}.part"
        with part.open("w") as file:
            json.dump(asdict(pointer), file)
        flush_to_disk(part)
        part.replace(path)
        flush_to_disk(self.folder)

    def read(
        self,
        pointer: BufferPointer | None,
        *,
        since: FileWeights | None = None,
        pages_of: Callable[[PackedLayout], NeededPages | None] | None = None,
    ) -> FileWeights:
        """Return the weights of `pointer`, in memory that the writer cannot change.

        Args:
            since: weights read before, to which deltas are applied in place if possible; not to be used afterwards.
            pages_of: returns the pages to keep of a file with this layout; the whole file is still
                read and checked. Not supported with deltas.

        Raises ValueError if there are no weights, or the files differ from those that were written.
        """
        if pointer is None:
            raise ValueError(f"nothing was written to {self.folder} yet.")
        if since is not None and since.buffer.numel() == pointer.num_bytes:
            with contextlib.suppress(ValueError, FileNotFoundError):
                return self._follow(since, pointer)
        path = self.path(pointer.slot)
        why = "size or checksum differ"
        try:
            with path.open("rb", buffering=0) as file:
                buffer, num_read, checksum = _read_file(file, pointer.num_bytes, pages_of)
            if num_read == pointer.num_bytes and checksum == pointer.anchor_checksum:
                anchor = replace(pointer, serial=pointer.anchor_serial, checksum=checksum)
                return self._follow(FileWeights.of(buffer, anchor), pointer)
        except (FileNotFoundError, ValueError) as error:
            why += f", {error}"
        raise ValueError(f"{path} does not hold the weights of write {pointer.serial}: {why}.")

    def _follow(self, start: FileWeights, pointer: BufferPointer) -> FileWeights:
        """Apply the deltas after `start` in place. Raises ValueError or FileNotFoundError if they do not fit."""
        assert start.pointer is not None
        checksum = start.pointer.checksum
        for serial in range(start.pointer.serial + 1, pointer.serial + 1):
            delta = Delta.from_bytes(self.delta_path(serial).read_bytes())
            if (delta.serial, delta.base_checksum) != (serial, checksum):
                raise ValueError(f"the delta of write {serial} was made from another write.")
            delta.apply(start.buffer)
            checksum = delta.checksum
        is_new = start.pointer.serial < pointer.serial
        if is_new:
            checksum = checksum_of(start.buffer)
        if checksum != pointer.checksum:
            raise ValueError(f"the deltas up to write {pointer.serial} result in other weights: the checksum differs.")
        return replace(start, pointer=pointer)

    def delta_path(self, serial: int) -> Path:
        """Return the file of a write's delta."""
        return self.folder / DELTA_FOLDER / f"{serial}.delta"

    def path(self, slot: int) -> Path:
        """Return the file of a buffer."""
        return self.folder / str(slot) / FILE_NAME


@dataclass(frozen=True)
class FileWeights:
    """A safetensors file in memory."""

    layout: PackedLayout
    buffer: torch.Tensor
    """[num_bytes] uint8, the whole file."""
    pointer: BufferPointer | None = None
    """Pointer from which it was read."""

    @classmethod
    def of(cls, buffer: torch.Tensor, pointer: BufferPointer | None = None) -> FileWeights:
        """Read the header of a file ([num_bytes] uint8)."""
        return cls(_layout_of(buffer, buffer.numel()), buffer, pointer)

    def has_layout_of(self, source: ModelWeights) -> bool:
        """Return whether the source has the same tensors."""
        own = sorted((place.name, place.dtype, place.shape) for place in self.layout.places)
        return own == sorted(map(tuple, source.metadata()))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as views of the buffer."""
        return dict(self.layout.views(self.buffer))


def _layout_of(head: torch.Tensor, num_bytes: int) -> PackedLayout:
    return PackedLayout(tuple(places_of(head)), num_bytes)


def _read_file(
    file: FileIO, num_bytes: int, pages_of: Callable[[PackedLayout], NeededPages | None] | None
) -> tuple[torch.Tensor, int, int]:
    """Return a file's bytes ([num_bytes] uint8), in full or in part, the number of bytes read, and their CRC-32."""
    pages = None
    if pages_of is not None:
        size = file.read(8)
        head = torch.frombuffer(
            bytearray(size + file.read(min(int.from_bytes(size, "little"), num_bytes))), dtype=torch.uint8
        )
        file.seek(0)
        with contextlib.suppress(ValueError, LookupError, TypeError, RuntimeError):  # the checksum reveals damage
            pages = pages_of(_layout_of(head, num_bytes))
    if pages is None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer, *_read_into(_bytes_of(buffer), file)
    buffer = pages.new_buffer()
    part = torch.empty(min(_CHUNK, num_bytes), dtype=torch.uint8)
    end = 0
    checksum = 0
    while end < num_bytes:
        num_read, checksum = _read_into(_bytes_of(part[: num_bytes - end]), file, checksum)
        pages.keep(buffer, part[:num_read], end)
        if not end:  # the header may be longer than the pages that were kept
            buffer[: len(head)] = head
        end += num_read
        if num_read < len(part):
            break
    return buffer, end, checksum


def _read_into(view: memoryview, file: FileIO, checksum: int = 0) -> tuple[int, int]:
    end = 0
    while end < len(view) and (num_bytes := file.readinto(view[end : end + _CHUNK])):
        checksum = zlib.crc32(view[end : end + num_bytes], checksum)
        end += num_bytes
    return end, checksum


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]
