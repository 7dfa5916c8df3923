"""`ConfinedSandbox`: a session of a `PythonExecutorService` as a `Sandbox`."""

from __future__ import annotations

import base64
import errno
import json
import os
import uuid
from collections.abc import Sequence

from llmrl.sandbox.base import SandboxResult
from llmrl.sandbox.service import PythonExecutorService

_RUN = """
import json, os, signal, subprocess, sys
process = subprocess.Popen({argv}, stdin=-1, stdout=-1, stderr=-1, start_new_session=True)
try:
    told, timed_out = process.communicate({stdin}, {timeout}), False
except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    told, timed_out = process.communicate(), True
told = [text.decode(errors="replace") for text in told]
told = [text if len(text) <= {most} else text[:{most} // 2] + "\\n[…]\\n" + text[-{most} // 2:] for text in told]
print(json.dumps([process.returncode, *told, timed_out], ensure_ascii=False))
"""
_PUT = """
import base64, os
os.makedirs(os.path.dirname({path}) or ".", exist_ok=True)
with open({path}, {mode}) as file:
    file.write(base64.b64decode({data}))
"""
_GET = """
import base64
with open({path}, "rb") as file:
    file.seek({start})
    print(base64.b64encode(file.read({size})).decode())
"""
_PUT_BYTES = 1 << 20
_GRACE_SECONDS = 5.0


class ConfinedSandbox:
    r"""A cage on this machine: the isolation and the limits of a `PythonExecutorService`, which many may share.

    What a command leaves running is ended with it. Where the cage itself ends, for want of memory or by a command that
    kills it, the result says so, and the next call begins in an empty folder.

    Args:
        service: makes the cages.

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
        self._service, self._session = service, uuid.uuid4().hex

    async def start(self) -> None:
        """Take a cage."""
        await self._execute("")

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command, see `Sandbox`."""
        most = self._service.limits.output_bytes // 16  # two of them, six bytes a character at worst, are kept whole
        code = _RUN.format(argv=list(argv), stdin=stdin, timeout=timeout, most=most)
        result = await self._service.run(code, session=self._session, timeout=timeout + _GRACE_SECONDS)
        if result.is_success:
            exit_code, stdout, stderr, timed_out = json.loads(result.stdout.splitlines()[-1])
            return SandboxResult(exit_code, stdout, stderr, timed_out)
        if result.reason:
            why = f"{result.stderr}The sandbox ended, and its files are lost.\n"
            return SandboxResult(result.returncode, "", why, result.reason == "timeout")
        return SandboxResult(127, "", f"{result.stderr.strip().splitlines()[-1]}\n")

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, see `Sandbox`."""
        for start in range(0, max(len(data), 1), _PUT_BYTES):
            part = base64.b64encode(data[start : start + _PUT_BYTES])
            await self._execute(_PUT.format(path=repr(path), mode=repr("ab" if start else "wb"), data=part))

    async def get(self, path: str) -> bytes:
        """Return a file, see `Sandbox`."""
        size = self._service.limits.output_bytes // 4  # in base64 it is 4/3 of that
        data = b""
        while True:
            part = base64.b64decode(await self._execute(_GET.format(path=repr(path), start=len(data), size=size)))
            data += part
            if len(part) < size:
                return data

    async def _execute(self, code: str) -> str:
        result = await self._service.run(code, session=self._session)
        if result.is_success:
            return result.stdout
        why = (result.stderr.strip().splitlines() or ["it ended"])[-1]
        number = errno.ENOENT if why.startswith("FileNotFoundError") else errno.EIO
        raise OSError(number, f"{os.strerror(number)} in the sandbox: {why}")

    async def close(self) -> None:
        """Give the cage back."""
        self._service.release(self._session)
