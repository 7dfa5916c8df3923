"""Commands and files in a `ConfinedSandbox`, loaded before confinement. Standard library only."""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import select
import signal
import stat
import time
from collections.abc import Sequence

from llmrl.sandbox.supervisor import KeptOutput

# How often to check whether a command has ended while another process keeps its output open.
_LOOK_SECONDS = 0.05
_PIECE_BYTES = 1 << 16


def run(argv: Sequence[str], stdin: bytes, timeout: float, num_kept: int) -> None:
    """Run a command, and print a line of JSON: exit code, output, errors, and whether it timed out.

    The function does not wait for processes that the command leaves running.

    Args:
        stdin: its input in base64.
        timeout: seconds after which the command is killed.
        num_kept: maximum number of bytes of output, and of errors, to keep.
    """
    import subprocess

    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # the command may end without reading its input
    pipe = subprocess.PIPE
    process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    writing = process.stdin.fileno()
    outputs = {stream.fileno(): KeptOutput(num_kept) for stream in (process.stdout, process.stderr)}
    poller = select.poll()
    for number in (writing, *outputs):
        os.set_blocking(number, False)
        poller.register(number, select.POLLOUT if number == writing else select.POLLIN)
    num_open = 3
    unsent = memoryview(base64.b64decode(stdin))
    deadline = time.monotonic() + timeout
    while num_open and process.poll() is None and (left := deadline - time.monotonic()) > 0:
        for ready, _ in poller.poll(1000 * min(left, _LOOK_SECONDS)):
            if ready == writing:
                unsent = _send(writing, unsent)
                is_at_end = not unsent
            else:
                is_at_end = outputs[ready].read(ready) == b""
            if is_at_end:
                poller.unregister(ready)
                num_open -= 1
                if ready == writing:
                    process.stdin.close()
    timed_out = False
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        timed_out = True
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for number, output in outputs.items():
        output.drain(number)
    texts = [output.text() for output in outputs.values()]
    print(json.dumps([process.returncode, *texts, timed_out], ensure_ascii=False))


def _send(writing: int, unsent: memoryview) -> memoryview:
    """Write to a pipe, and return the unsent rest, which is empty if the pipe was closed."""
    try:
        return unsent[os.write(writing, unsent[:_PIECE_BYTES]) :]
    except BlockingIOError:
        return unsent
    except OSError:
        return unsent[:0]


def put(path: str, data: bytes, is_first: bool) -> None:
    """Write or append to a file, and create missing folders."""
    flags = os.O_TRUNC if is_first else os.O_APPEND
    with os.fdopen(_open_own(path, os.O_WRONLY | os.O_CREAT | flags), "wb") as file:
        file.write(base64.b64decode(data))


def get(path: str, start: int, size: int) -> None:
    """Print a part of a file in base64."""
    with os.fdopen(_open_own(path, os.O_RDONLY), "rb") as file:
        file.seek(start)
        print(base64.b64encode(file.read(size)).decode())


def _open_own(path: str, flags: int) -> int:
    """Open a regular file below the sandbox's folder; others, such as pipes, could block."""
    folder = os.path.realpath(os.environ["HOME"])
    place = os.path.realpath(path)
    if not place.startswith(f"{folder}/") and place != folder:
        raise PermissionError(errno.EACCES, "The path leads out of the sandbox's folder", path)
    if flags & os.O_CREAT:
        os.makedirs(os.path.dirname(place), exist_ok=True)  # noqa: PTH103, PTH120
    try:
        opened = os.open(place, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        error.filename = path
        raise
    mode = os.fstat(opened).st_mode
    if stat.S_ISREG(mode):
        return opened
    os.close(opened)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "The path is a folder", path)
    raise OSError(errno.EINVAL, "The path is not a regular file", path)
