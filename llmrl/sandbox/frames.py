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
    """A supervisor's answer to the service: the result of a piece of code, or, initially, a report on its start."""

    why: NotRequired[str]
    """Reason why the interpreter has not started."""

    returncode: int
    is_exit: bool
    reason: str
    num_left_processes: int
    is_alive: bool
    stdout: str
    stderr: str


class BrokenFrame(Exception):
    """The stream ended within a message, or contains no valid message."""


def encode(message: object) -> bytes:
    """Return a message with its header."""
    body = json.dumps(message).encode()  # ASCII: lone surrogates are escaped
    return HEADER.pack(len(body)) + body


def receive(channel: socket.socket) -> Any:
    """Return the next message, or None at the end. Raises BrokenFrame if it is incomplete, too long or invalid."""
    header = _receive_exactly(channel, HEADER.size)
    if header is None:
        return None
    (size,) = HEADER.unpack(header)
    if size > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a message of {size} bytes, more than the limit of {MAX_FRAME_BYTES}")
    body = _receive_exactly(channel, size)
    if body is None and size:
        raise BrokenFrame("the stream ended")
    return decode(body or b"")


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
        """Yield the messages that are complete. Raises BrokenFrame if a message is too long or invalid JSON."""
        self._held += data
        while len(self._held) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._held)
            if size > self._max_bytes:
                raise BrokenFrame(f"a message of {size} bytes, more than the limit of {self._max_bytes}")
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


def _receive_exactly(channel: socket.socket, count: int) -> bytes | None:
    pieces: list[bytes] = []
    missing = count
    while missing:
        piece = channel.recv(min(missing, 1 << 20))
        if not piece:
            if missing < count:
                raise BrokenFrame("the stream ended")
            return None
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
