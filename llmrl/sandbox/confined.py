"""`ConfinedSandbox`: a `Sandbox` in a session of a `PythonExecutorService`."""

from __future__ import annotations

import base64
import errno
import json
import os
import uuid
from collections.abc import Sequence

from llmrl.sandbox.base import SandboxResult
from llmrl.sandbox.service import PythonExecutorService

_PUT_BYTES = 1 << 20
# Interpreters have `inside` loaded; the placeholder is a call of one of its functions.
_CALL = "from llmrl.sandbox import inside\ninside.{}"
_GRACE_SECONDS = 30.0


class ConfinedSandbox:
    r"""A sandbox on this machine, with the isolation and limits of a shared `PythonExecutorService`.

    Processes that a command leaves running are killed. If the sandbox itself ends (out of memory, or killed by a
    command), the result says so, and the next call starts with an empty folder. `put` and `get`
    support only regular files in the sandbox's folder, of at most `PythonLimits.file_bytes`.

    Example:
        >>> from llmrl._utils.asynchronous import run_sync
        >>> async def look(service):
        ...     sandbox = ConfinedSandbox(service)
        ...     await sandbox.start()
        ...     await sandbox.put("notes/a.txt", b"first\n")
        ...     result = await sandbox.run(["sh", "-c", "wc -l < notes/a.txt"])
        ...     await sandbox.close()
        ...     return result
        >>> service = PythonExecutorService(num_ready=1)
        >>> run_sync(look(service))
        SandboxResult(exit_code=0, stdout='1\n', stderr='', timed_out=False)
        >>> service.close()
    """

    def __init__(self, service: PythonExecutorService) -> None:
        self._service = service
        self._session = uuid.uuid4().hex

    async def start(self) -> None:
        """Start an interpreter."""
        await self._execute("run")

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command."""
        # Both outputs fit, with up to six bytes of JSON per byte.
        num_kept = self._service.limits.output_bytes // 16
        code = _CALL.format(f"run({list(argv)!r}, {base64.b64encode(stdin)!r}, float('{timeout}'), {num_kept})")
        result = await self._service.run(code, session=self._session, timeout=timeout + _GRACE_SECONDS)
        if result.reason:
            why = f"{result.stderr}The sandbox ended, and its files are lost.\n"
            return SandboxResult(result.returncode, "", why, result.reason == "timeout")
        if not result.is_success:
            return SandboxResult(127, "", f"{_last_line(result.stderr)}\n")
        return _as_result(_last_line(result.stdout))

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        for start in range(0, max(len(data), 1), _PUT_BYTES):
            part = base64.b64encode(data[start : start + _PUT_BYTES])
            await self._execute(f"put({path!r}, {part!r}, {start == 0})")

    async def get(self, path: str) -> bytes:
        """Return a regular file of the sandbox's folder."""
        limits = self._service.limits
        size = max(1, limits.output_bytes // 4 - 1) * 3  # fits in the output as base64 with a line end
        data = b""
        while len(data) <= limits.file_bytes:
            try:
                part = base64.b64decode(await self._execute(f"get({path!r}, {len(data)}, {size})"), validate=True)
            except ValueError as error:
                raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} in the sandbox: {error}") from None
            data += part
            if len(part) < size:
                return data
        raise OSError(errno.EFBIG, f"{os.strerror(errno.EFBIG)}: more than {limits.file_bytes} bytes")

    async def _execute(self, call: str) -> str:
        result = await self._service.run(_CALL.format(call), session=self._session)
        if result.is_success:
            return result.stdout.rstrip("\n")
        why = f"{_last_line(result.stderr):.300}" or "the interpreter ended"
        number = errno.ENOENT if why.startswith("FileNotFoundError") else errno.EIO
        raise OSError(number, f"{os.strerror(number)} in the sandbox: {why}")

    async def close(self) -> None:
        """Release the interpreter."""
        self._service.release(self._session)


def _last_line(text: str) -> str:
    """Return the last line; only a newline ends a line."""
    return text.rstrip("\n").rpartition("\n")[2]


def _as_result(line: str) -> SandboxResult:
    """Parse the output of `inside.run`; it is invalid if a command has written into it."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        told = None
    match told:
        case [int(exit_code), str(stdout), str(stderr), bool(timed_out)]:
            return SandboxResult(exit_code, stdout, stderr, timed_out)
    return SandboxResult(127, "", "The answer cannot be read: a process that the command started wrote into it.\n")
