"""`RemoteSandbox`: base class for sandboxes of services that run shell commands and transfer files."""

from __future__ import annotations

import base64
import errno
import itertools
import os
import posixpath
import shlex
import signal
import time
import uuid
from collections.abc import Sequence
from typing import Generic, TypeVar

from llmrl.sandbox.base import ERRNO_OF_EXIT, MAX_OUTPUT, SandboxResult

_GRACE_SECONDS = 60.0
# The outputs go to files, so that a process that the command leaves running does not keep the service waiting. They are
# returned as one text in Base64, because services mix both outputs or decode them as UTF-8.
_RUN = (
    'cd "$1" && at="$2" && limit="$3" && input="$4" && shift 4 || exit 1\n'
    'timeout -s KILL "$limit" "$@" <"$input" >"$at.out" 2>"$at.err"\n'
    'echo $?; head -c {most} "$at.out" | base64 | tr -d "\\n"; echo; head -c {most} "$at.err" | base64 | tr -d "\\n"\n'
    'echo; rm -f "$at".*'
)
_CHECK = 'cd "$1" || exit 1; if [ -d "$2" ]; then echo 21; elif [ -e "$2" ]; then echo 0; else echo 2; fi'


Handle = TypeVar("Handle")
"""An SDK's object for a sandbox."""


class RemoteSandbox(Generic[Handle]):
    """A sandbox of a service; subclasses implement how a line of shell is run and how files are transferred.

    Commands run in `folder`. The image needs GNU's `timeout` and `base64`, which images of Debian
    and Ubuntu have. A command that takes too long is killed with its process group.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._sandbox: Handle | None = None
        self._place = f"/tmp/llmrl-{uuid.uuid4().hex}"
        self._numbers = itertools.count()

    @property
    def _started(self) -> Handle:
        assert self._sandbox is not None, "the sandbox was not started"
        return self._sandbox

    async def _create(self) -> Handle:
        """Create the sandbox."""
        raise NotImplementedError

    async def _execute(self, line: str, timeout: float) -> str:
        """Run a line of shell, which takes less than `timeout` seconds, and return its output."""
        raise NotImplementedError

    async def _upload(self, path: str, data: bytes) -> None:
        """Write a file, given by its absolute path, in a folder that exists."""
        raise NotImplementedError

    async def _download(self, path: str) -> bytes:
        """Return the content of an existing file, given by its absolute path."""
        raise NotImplementedError

    async def _delete(self, sandbox: Handle) -> None:
        """Remove the sandbox, which the service may have ended already."""
        raise NotImplementedError

    async def start(self) -> None:
        """Create the sandbox and its working folder."""
        self._sandbox = await self._create()
        await self._execute(f"mkdir -p {shlex.quote(self._folder)}", _GRACE_SECONDS)

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command, which is killed with its process group after `timeout` seconds."""
        at = f"{self._place}-{next(self._numbers)}"
        source = "/dev/null"
        if stdin:
            source = f"{at}.in"
            await self._upload(source, stdin)
        words = ["sh", "-c", _RUN.format(most=MAX_OUTPUT), "sh", self._folder, at, f"{timeout:g}", source, *argv]
        began = time.monotonic()
        told = await self._execute(shlex.join(words), timeout + _GRACE_SECONDS)
        try:
            code, out, err = told.splitlines()
            number = int(code)
            stdout, stderr = (base64.b64decode(part, validate=True).decode(errors="replace") for part in (out, err))
        except ValueError:
            raise OSError(errno.EIO, f"the sandbox returned {told[:500]!r} instead of a command's result") from None
        is_killed = number == 128 + signal.SIGKILL
        timed_out = is_killed and time.monotonic() - began >= timeout
        return SandboxResult(-signal.SIGKILL if is_killed else number, stdout, stderr, timed_out)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        whole = posixpath.join(self._folder, path)
        await self._execute(f"mkdir -p {shlex.quote(posixpath.dirname(whole))}", _GRACE_SECONDS)
        await self._upload(whole, data)

    async def get(self, path: str) -> bytes:
        """Return a file's content."""
        words = ["sh", "-c", _CHECK, "sh", self._folder, path]
        told = (await self._execute(shlex.join(words), _GRACE_SECONDS)).strip()
        if told != "0":
            number = ERRNO_OF_EXIT.get(int(told) if told.isdecimal() else -1, errno.EIO)
            raise OSError(number, f"{os.strerror(number)} in the sandbox", path)
        return await self._download(posixpath.join(self._folder, path))

    async def close(self) -> None:
        """Remove the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._delete(sandbox)
