"""Two files of weights and a pointer to the whole one."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

import torch

from llmrl._utils.files import flush_to_disk
from llmrl._utils.safetensors_file import places_of, write_safetensors
from llmrl.weight_sync.buffers import PackedLayout
from llmrl.weight_sync.source import ModelWeights

POINTER_NAME = "current.json"
FILE_NAME = "model.safetensors"
_CHUNK = 1 << 24


@dataclass(frozen=True, slots=True)
class BufferPointer:
    """Which of the two buffers is whole, what it holds and how to tell."""

    slot: int
    """0 or 1."""
    serial: int
    """Counts writes, from 1."""
    version: int
    """Policy version of the weights."""
    num_bytes: int
    checksum: int
    """CRC-32 of the file."""


class DoubleBuffer:
    """Weights on a file system: written beside the current ones, which stay whole until the pointer moves.

    A reader that follows the pointer gets whole weights or an error, however the writer died. Each buffer is a folder
    with one safetensors file; there are never more than two.

    Example:
        >>> import tempfile
        >>> buffer = DoubleBuffer(tempfile.mkdtemp())
        >>> buffer.write({"weight": torch.ones(2)}).serial
        1
        >>> buffer.read(buffer.pointer()).tensors()["weight"]
        tensor([1., 1.])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def pointer(self) -> BufferPointer | None:
        """Return the current buffer; `None` before the first write.

        Raises:
            ValueError: when the pointer's file is damaged.
        """
        path = self.folder / POINTER_NAME
        try:
            return BufferPointer(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"the pointer {path} is damaged: {error}") from error

    def write(self, weights: ModelWeights | Mapping[str, torch.Tensor], version: int | None = None) -> BufferPointer:
        """Write into the buffer that is not current and move the pointer to it.

        Args:
            weights: tensors by name, or a model's, of which one weight at a time is held.
            version: the next one, unless given.

        Raises:
            ValueError: when a source yields other weights than it announces.
        """
        current = self.pointer()
        slot = 0 if current is None else 1 - current.slot
        path = self.path(slot)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # weights are their owner's
        path.parent.mkdir(exist_ok=True)
        for stale in path.parent.iterdir():  # the weights before the current ones, and what killed writers left
            stale.unlink()
        source = ModelWeights(weights) if isinstance(weights, Mapping) else weights
        num_bytes, checksum = write_safetensors(path, source.metadata(), source)
        pointer = BufferPointer(
            slot=slot,
            serial=1 if current is None else current.serial + 1,
            version=version if version is not None else 1 if current is None else current.version + 1,
            num_bytes=num_bytes,
            checksum=checksum,
        )
        self.point_to(pointer)
        return pointer

    def point_to(self, pointer: BufferPointer | None) -> None:
        """Move the pointer, whole or not at all; `None` takes it away."""
        path = self.folder / POINTER_NAME
        if pointer is None:
            path.unlink(missing_ok=True)
            return
        # One name, so that writers that were killed leave one file at most.
        part = self.folder / f"{POINTER_NAME}.part"
        with part.open("w") as file:
            json.dump(asdict(pointer), file)
        flush_to_disk(part)
        part.replace(path)
        flush_to_disk(self.folder)

    def read(self, pointer: BufferPointer | None) -> FileWeights:
        """Return the weights that `pointer` names, in memory of their own: what the writer does next cannot reach them.

        Raises:
            ValueError: when there are none, or they are not those that were written.
        """
        if pointer is None:
            raise ValueError(f"nothing was written to {self.folder} yet.")
        path = self.path(pointer.slot)
        buffer = torch.empty(pointer.num_bytes, dtype=torch.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                num_read, checksum = _read_into(memoryview(buffer.numpy()), file)  # type: ignore[arg-type]
        except FileNotFoundError:
            num_read, checksum = 0, 0
        if num_read != pointer.num_bytes or checksum != pointer.checksum:
            raise ValueError(f"{path} does not hold the weights of write {pointer.serial}: size or checksum differ.")
        return FileWeights.of(buffer)

    def path(self, slot: int) -> Path:
        """Return the file of a buffer."""
        return self.folder / str(slot) / FILE_NAME


@dataclass(frozen=True)
class FileWeights:
    """A safetensors file in memory."""

    layout: PackedLayout
    buffer: torch.Tensor
    """[num_bytes] uint8, of the whole file."""

    @classmethod
    def of(cls, buffer: torch.Tensor) -> FileWeights:
        """Read the header of a file ([num_bytes] uint8)."""
        places = places_of(buffer)
        layout = PackedLayout(
            names=tuple(place.name for place in places),
            dtypes=tuple(place.dtype for place in places),
            shapes=tuple(place.shape for place in places),
            offsets=tuple(place.offset for place in places),
            num_bytes=buffer.numel(),
        )
        return cls(layout, buffer)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, as views of the buffer."""
        return dict(self.layout.views(self.buffer))


def _read_into(view: memoryview, file: FileIO) -> tuple[int, int]:
    """Fill `view`; number of bytes read and their CRC-32."""
    end, checksum = 0, 0
    while end < len(view) and (num_bytes := file.readinto(view[end : end + _CHUNK])):
        checksum = zlib.crc32(view[end : end + num_bytes], checksum)
        end += num_bytes
    return end, checksum
