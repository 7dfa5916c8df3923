"""`Sandbox`: where a conversation's commands run and its files lie, for any provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a command ended."""

    exit_code: int
    """Negative, a signal."""
    stdout: str
    stderr: str
    timed_out: bool = False


class Sandbox(Protocol):
    """One place with files and processes: a cage on this machine, a container, a remote provider's machine.

    One serves one conversation. `start` and `close` are called once, on one event loop; the others between them.
    `llmrl.testing.check_sandbox` says whether a class keeps this contract.
    """

    async def start(self) -> None:
        """Make the place, with an empty working folder."""
        ...

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command in the working folder; never raises for what the command does.

        Args:
            argv: the program and its arguments; no shell reads them.
            stdin: what it may read.
            timeout: seconds, after which it is killed with what it started.
        """
        ...

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, below the working folder where the path is relative; folders on the way are made."""
        ...

    async def get(self, path: str) -> bytes:
        """Return a file; raise OSError if it cannot be read, FileNotFoundError if it does not exist."""
        ...

    async def close(self) -> None:
        """Let go of everything. May be called twice, and without `start`."""
        ...
