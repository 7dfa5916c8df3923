"""`Sandbox`: the interface of an isolated environment for a conversation's commands and files."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_OUTPUT = 1 << 20
"""Bytes kept of a command's output, and of its errors, in containers and remote sandboxes."""
ERRNO_OF_EXIT = {2: errno.ENOENT, 21: errno.EISDIR}
"""Error of a file that cannot be read, by the exit code of the shell script that reads it."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """Result of a command."""

    exit_code: int
    """Exit code. If a signal ended the command, its negated number; in containers and remote sandboxes 128 plus it."""
    stdout: str
    stderr: str
    timed_out: bool = False


class Sandbox(Protocol):
    """An environment with files and processes: a confined process, a container or a remote machine.

    Each conversation has its own sandbox. `start` is called once, before the other methods; `close`
    is called last, on the same event loop. `llmrl.testing.check_sandbox` tests an implementation.
    """

    async def start(self) -> None:
        """Create the environment with an empty working folder; raise an error if that takes too long."""
        ...

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command in the working folder; the result reports a failure of the command.

        Args:
            argv: program and arguments; no shell is involved.
            stdin: input of the command.
            timeout: seconds after which the command and its child processes are killed.
        """
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, relative to the working folder, and create missing folders."""
        ...

    async def get(self, path: str) -> bytes:
        """Return the content of a file; raise OSError if it cannot be read."""
        ...

    async def close(self) -> None:
        """Free all resources. May be called twice, and without `start`."""
        ...
