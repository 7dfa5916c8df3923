"""JSON messages with a length prefix over stream sockets. Standard library only."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from typing import Any, NotRequired, TypedDict

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 16 << 20


class Answer(TypedDict):
    """A supervisor's answer to the service: the result of a piece of code, or first only `why`."""

    why: NotRequired[str]
    """Reason why the interpreter has not started; empty if it has."""

    returncode: int
    is_exit: bool
    reason: str
    """`timeout` or `died` if the interpreter has ended; empty if it can run more code."""
    num_left_processes: int
    stdout: str
    stderr: str


class BrokenFrame(Exception):
    """The stream ended within a message, or contains no valid message."""


def encode(message: object) -> bytes:
    """Return a message with its header."""
    body = json.dumps(message).encode()  # ASCII: lone surrogates are escaped
    return HEADER.pack(len(body)) + body


def receive(channel: socket.socket) -> Any:
    """Return the next message, or None at the end. Raises BrokenFrame if it is cut, too long or invalid."""
    header = _receive_exactly(channel, HEADER.size)
    if not header:
        return None
    return decode(_receive_exactly(channel, _size_of(header, MAX_FRAME_BYTES)))


class FrameBuffer:
    """Splits a stream into messages, without waiting.

    Example:
        >>> buffer, stream = FrameBuffer(100), encode([1]) + encode([2])
        >>> list(buffer.add(stream[:9])), list(buffer.add(stream[9:]))
        ([[1]], [[2]])
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()

    def add(self, data: bytes) -> Iterator[Any]:
        """Yield the complete messages. Raises BrokenFrame if one is too long or invalid JSON."""
        self._held += data
        while len(self._held) >= HEADER.size:
            size = _size_of(self._held, self._max_bytes)
            if len(self._held) < HEADER.size + size:
                return
            body = bytes(self._held[HEADER.size : HEADER.size + size])
            del self._held[: HEADER.size + size]
            yield decode(body)


def decode(body: bytes) -> Any:
    """Decode the body of a message. Raises BrokenFrame if it is invalid JSON."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BrokenFrame(str(error)) from None


def _size_of(message: bytes | bytearray, max_bytes: int) -> int:
    """Return the size of a message's body. Raises BrokenFrame if it is too large."""
    (size,) = HEADER.unpack_from(message)
    if size > max_bytes:
        raise BrokenFrame(f"a message of {size} bytes, more than the limit of {max_bytes}")
    return size


def _receive_exactly(channel: socket.socket, count: int) -> bytes:
    """Return the next bytes, or none at the end. Raises BrokenFrame if the stream ends within them."""
    data = bytearray()
    while len(data) < count and (piece := channel.recv(min(count - len(data), 1 << 20))):
        data += piece
    if 0 < len(data) < count:
        raise BrokenFrame("the stream ended")
    return bytes(data)
