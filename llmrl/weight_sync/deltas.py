"""Deltas between two versions of a file or buffer of weights: the changed words and their differences.

An optimizer step changes few bfloat16 weights, and by few units in the last place. Positions are stored as gaps, and
differences as planes of low and high bytes; both are small numbers that compress well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from llmrl._utils.safetensors_file import TensorPlace

_ESCAPE = 255
"""Byte of a gap that continues in the next byte."""
_LEVEL = 1
"""zlib level; higher levels take several times as long for a few per cent."""
_PART = 1 << 24
"""Words compared at once."""

Positions = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Delta:
    """Change from one version of a file or buffer to the next, both identified by checksums."""

    serial: int
    """Serial of the write, or version, that results."""
    base_checksum: int
    checksum: int
    num_gap_bytes: int
    data: bytes
    """Gaps, low bytes and high bytes, compressed."""

    def to_bytes(self) -> bytes:
        """Serialise the delta."""
        header = {name: value for name, value in asdict(self).items() if name != "data"}
        return json.dumps(header).encode() + b"\n" + self.data

    @classmethod
    def from_bytes(cls, data: bytes) -> Delta:
        """Read the result of `to_bytes`. Raises ValueError if it is damaged."""
        header, _, payload = data.partition(b"\n")
        try:
            return cls(**json.loads(header), data=payload)
        except (TypeError, RecursionError) as error:
            raise ValueError(f"not a delta: {error}") from error

    def apply(self, image: torch.Tensor) -> None:
        """Apply the delta in place ([num_bytes] uint8). Raises ValueError, with undefined bytes, if it is damaged."""
        words = _words_of(image.numpy())
        # Each gap byte skips or changes at least one word, and each change has at least one gap
        # byte and two bytes of difference, so valid data are not longer.
        positions, differences = decode(
            _decompress(self.data, 3 * min(self.num_gap_bytes, len(words))), self.num_gap_bytes
        )
        if len(positions) and positions[-1] >= len(words):
            raise ValueError(f"the delta belongs to other weights: it changes word {positions[-1]} of {len(words)}.")
        words[positions] += differences


def encode(positions: Positions, differences: Words) -> tuple[bytes, int]:
    """Encode ascending positions and differences, [num_changed] each; return bytes and the number of gap bytes.

    Example:
        >>> data, num_gap_bytes = encode(np.array([0, 300]), np.array([1, 65535], dtype=np.uint16))
        >>> num_gap_bytes, [column.tolist() for column in decode(data, num_gap_bytes)]
        (3, [[0, 300], [1, 65535]])
    """
    # A gap is written as `gap // 255` escape bytes and a last byte of `gap % 255`.
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    stream = np.full(ends.max(initial=-1) + 1, _ESCAPE, dtype=np.uint8)
    stream[ends] = gaps % _ESCAPE
    planes = differences.astype("<u2").view(np.uint8).reshape(-1, 2)
    return stream.tobytes() + planes.T.tobytes(), len(stream)


def decode(data: bytes, num_gap_bytes: int) -> tuple[Positions, Words]:
    """Decode the result of `encode`. Raises ValueError if lengths do not match."""
    if not 0 <= num_gap_bytes <= len(data):
        raise ValueError(f"the delta announces {num_gap_bytes} gap bytes and has {len(data)} bytes.")
    stream, planes = np.split(np.frombuffer(data, dtype=np.uint8), [num_gap_bytes])
    ends = np.flatnonzero(stream != _ESCAPE)
    # A gap is the sum of its bytes; a position is the sum of all gaps so far plus the number of earlier positions.
    positions = np.cumsum(stream, dtype=np.int64)[ends] + np.arange(len(ends))
    if len(planes) != 2 * len(ends) or (num_gap_bytes and stream[-1] == _ESCAPE):
        raise ValueError(f"{len(ends)} positions and {len(planes)} difference bytes; two per position are expected.")
    return positions, np.ascontiguousarray(planes.reshape(2, -1).T).view("<u2")[:, 0]


class DeltaWriter:
    """Writer that puts new weights into a file's bytes, `image` ([num_bytes] uint8), and records the changes."""

    def __init__(self, image: torch.Tensor, places: Iterable[TensorPlace]) -> None:
        self._image = image
        self._places = {place.name: place for place in places}
        self._found: list[tuple[Positions, Words]] = []

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one tensor. Raises ValueError if the file has no such tensor."""
        place = self._places.pop(name, None)
        if place is None or (place.dtype, place.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"the source yielded {name!r} {tensor.dtype} {tuple(tensor.shape)}, which it did not announce."
            )
        new = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        image = self._image.numpy()
        start = place.offset
        if start % 2 or len(new) % 2:  # the tensor's words include bytes of a neighbour
            first = start - start % 2
            end = min(start + len(new) + (start + len(new)) % 2, len(image))
            new = np.concatenate([image[first:start], new, image[start + len(new) : end]])
            start = first
        own = _words_of(image[start : start + len(new)])
        words = _words_of(new)
        for begin in range(0, len(words), _PART):
            part = slice(begin, begin + _PART)
            changed = np.flatnonzero(own[part] != words[part])
            changed += begin
            self._found.append((changed + start // 2, words[changed] - own[changed]))
            own[part] = words[part]
        if len(new) % 2:
            image[start + len(new) - 1] = new[-1]

    def finish(self, serial: int, base_checksum: int, checksum: int) -> bytes | None:
        """Return the serialised delta; None if it cannot be represented, or half of the image is smaller.

        Raises ValueError if tensors are missing.
        """
        if self._places:
            raise ValueError(f"the source did not yield {sorted(self._places)[:3]}, which it announced.")
        self._found.sort(key=lambda found: found[0][:1].tolist())
        positions = np.concatenate([np.empty(0, np.int64), *(positions for positions, _ in self._found)])
        differences = np.concatenate([np.empty(0, np.uint16), *(added for _, added in self._found)])
        if len(self._image) % 2 or (np.diff(positions) <= 0).any():
            return None
        data, num_gap_bytes = encode(positions, differences)
        delta = Delta(serial, base_checksum, checksum, num_gap_bytes, zlib.compress(data, _LEVEL)).to_bytes()
        return delta if 2 * len(delta) < len(self._image) else None


def _decompress(data: bytes, max_num_bytes: int) -> bytes:
    """Decompress at most `max_num_bytes` bytes, because a few damaged bytes may expand to any size."""
    stream = zlib.decompressobj()
    try:
        result = stream.decompress(data, max(max_num_bytes, 0) + 1)
    except zlib.error as error:
        raise ValueError(f"a damaged delta: {error}") from error
    if len(result) > max_num_bytes or not stream.eof:
        raise ValueError(f"a damaged delta: its {len(data)} bytes do not end within {max_num_bytes}.")
    return result


def _words_of(data: npt.NDArray[np.uint8]) -> Words:
    return data[: len(data) // 2 * 2].view("<u2")
