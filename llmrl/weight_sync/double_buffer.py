"""Two folders of weights and a pointer to the whole one."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

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
    num_bytes: int
    checksum: int
    """CRC-32 of the file."""


class DoubleBuffer:
    """Weights on a file system: written beside the current ones, which stay whole until the pointer moves.

    A reader that follows the pointer gets whole weights or an error, however the writer died.

    Example:
        >>> import tempfile
        >>> buffer = DoubleBuffer(tempfile.mkdtemp())
        >>> buffer.write({"weight": torch.ones(2)}).serial
        1
        >>> buffer.read(buffer.pointer())["weight"]
        tensor([1., 1.])
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def pointer(self) -> BufferPointer | None:
        """The current buffer; `None` before the first write.

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

    def write(self, weights: dict[str, torch.Tensor]) -> BufferPointer:
        """Write contiguous `weights` into the buffer that is not current and move the pointer to it."""
        from safetensors.torch import save_file

        current = self.pointer()
        slot = 0 if current is None else 1 - current.slot
        path = self.path(slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, path)
        pointer = BufferPointer(
            slot=slot,
            serial=1 if current is None else current.serial + 1,
            num_bytes=path.stat().st_size,
            checksum=file_checksum(path),
        )
        self.point_to(pointer)
        return pointer

    def point_to(self, pointer: BufferPointer) -> None:
        """Move the pointer, whole or not at all."""
        part = self.folder / f"{POINTER_NAME}.{os.getpid()}.part"
        with part.open("w") as file:
            json.dump(asdict(pointer), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / POINTER_NAME)

    def read(self, pointer: BufferPointer | None) -> dict[str, torch.Tensor]:
        """The weights that `pointer` names.

        Raises:
            ValueError: when there are none, or they are not those that were written.
        """
        from safetensors.torch import load_file

        if pointer is None:
            raise ValueError(f"nothing was written to {self.folder} yet.")
        path = self.path(pointer.slot)
        if not path.is_file() or path.stat().st_size != pointer.num_bytes or file_checksum(path) != pointer.checksum:
            raise ValueError(f"{path} does not hold the weights of write {pointer.serial}: size or checksum differ.")
        return load_file(path)

    def path(self, slot: int) -> Path:
        """The file of a buffer."""
        return self.folder / str(slot) / FILE_NAME


def file_checksum(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
