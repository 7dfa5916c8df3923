"""Streaming of safetensors files, because the writer of the safetensors library would hold all tensors twice."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from llmrl._utils.files import flush_to_disk

Announced: TypeAlias = tuple[str, torch.dtype, Sequence[int]]
"""Name, dtype and shape of a tensor that follows."""

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHECKSUM_SIZE = 4
_METADATA = "__metadata__"


class TensorPlace(NamedTuple):
    """Location of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the file."""

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of the file's bytes (uint8, `[num_bytes]`)."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


def write_safetensors(
    path: Path,
    entries: Sequence[Announced],
    pairs: Iterable[tuple[str, torch.Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
    checksum_name: str | None = None,
) -> tuple[int, int]:
    """Write a file, flush it to disk, and return its size and CRC-32.

    Args:
        entries: name, dtype and shape of each tensor.
        pairs: names and tensors, in the order of `entries`.
        metadata: text to store in the file's header.
        checksum_name: name of an additional last tensor, the CRC-32 of everything before it.

    Raises ValueError if the tensors differ from `entries`.
    """
    # Tensors of wide dtypes come first, so that every tensor is aligned.
    in_order = sorted(entries, key=lambda entry: -entry[1].itemsize)
    if in_order != list(entries):
        held = dict(pairs)
        pairs = ((name, held[name]) for name, _, _ in in_order)
    header: dict[str, object] = {} if metadata is None else {_METADATA: dict(metadata)}
    end = 0
    last: list[Announced] = [] if checksum_name is None else [(checksum_name, torch.uint8, [_CHECKSUM_SIZE])]
    for name, dtype, shape in [*in_order, *last]:
        start = end
        end = end + torch.Size(shape).numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    checksum = zlib.crc32(head := len(text).to_bytes(8, "little") + text)
    with path.open("wb") as file:
        file.write(head)
        for (name, dtype, shape), (given, tensor) in zip(in_order, pairs, strict=True):
            if (name, dtype, tuple(shape)) != (given, tensor.dtype, tuple(tensor.shape)):
                raise ValueError(f"the source announced {name!r} {dtype} {tuple(shape)} and yielded {given!r}.")
            part = memoryview(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            file.write(part)
            checksum = zlib.crc32(part, checksum)
        if last:
            file.write(seal := checksum.to_bytes(_CHECKSUM_SIZE, "little"))
            checksum = zlib.crc32(seal, checksum)
    flush_to_disk(path)
    return len(head) + end, checksum


def is_sealed(buffer: torch.Tensor) -> bool:
    """Return whether a file (uint8, `[num_bytes]`) ends with the checksum of its content."""
    data = memoryview(buffer.numpy())  # type: ignore[arg-type]
    sealed = data[:-_CHECKSUM_SIZE]
    seal = data[-_CHECKSUM_SIZE:]
    return zlib.crc32(sealed) == int.from_bytes(seal, "little")


def places_of(buffer: torch.Tensor) -> list[TensorPlace]:
    """Return the locations of the tensors in a file (uint8, `[num_bytes]`)."""
    header_size = int.from_bytes(bytes(buffer[:8].tolist()), "little")
    header = json.loads(bytes(buffer[8 : 8 + header_size].numpy()))
    return [
        TensorPlace(name, DTYPES[one["dtype"]], tuple(one["shape"]), 8 + header_size + one["data_offsets"][0])
        for name, one in header.items()
        if name != _METADATA
    ]
