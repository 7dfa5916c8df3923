"""`ContainerSandbox` and `SSHSandbox`: sandboxes in a container or on another machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import shlex
import shutil
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path

from llmrl._utils.asynchronous import write_input
from llmrl.sandbox.base import ERRNO_OF_EXIT, MAX_OUTPUT, SandboxResult

_GRACE_SECONDS = 10.0
# A shell writes its process id, which is that of its group, to a file; then the command replaces it.
_RUN = 'echo $$ >"$0" && exec "$@"'
_KILL = 'kill -s KILL -- "-$(cat "$0")"'  # dash takes no `--` after `-KILL`
_PUT = 'mkdir -p "$(dirname "$1")" && cat >"$1"'
_GET = 'if [ -d "$1" ]; then exit 21; elif [ -e "$1" ]; then cat "$1"; else exit 2; fi'


class _CommandSandbox:
    """Base of sandboxes that run commands through a program, such as `docker exec`."""

    def __init__(self) -> None:
        self._name = f"llmrl-{uuid.uuid4().hex}"
        self._numbers = itertools.count()

    def _inside(self, argv: Sequence[str]) -> list[str]:
        """Return the local command that runs `argv` in the sandbox, as a process group's leader."""
        raise NotImplementedError

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command; after `timeout` seconds or if cancelled, its process group is killed."""
        mark = f"/tmp/{self._name}-{next(self._numbers)}"
        kill = self._inside(["sh", "-c", _KILL, mark])
        command = self._inside(["sh", "-c", _RUN, mark, *argv])
        code, out, err, timed_out = await _run(command, timeout, stdin, kill=kill)
        return SandboxResult(code, out.decode(errors="replace"), err.decode(errors="replace"), timed_out)

    async def put(self, path: str, data: bytes) -> None:
        """Write a file."""
        await self._file(_PUT, path, data)

    async def get(self, path: str) -> bytes:
        """Return a file's content."""
        return await self._file(_GET, path)

    async def _file(self, script: str, path: str, data: bytes = b"") -> bytes:
        command = self._inside(["sh", "-c", script, "sh", path])
        code, out, err, timed_out = await _run(command, 6 * _GRACE_SECONDS, data, max_output=None)
        if code or timed_out:
            number = ERRNO_OF_EXIT.get(code, errno.EIO)
            raise OSError(number, f"{os.strerror(number)} in the sandbox: {err.decode(errors='replace').strip()}", path)
        return out


class ContainerSandbox(_CommandSandbox):
    """A sandbox in its own container, which the command of Docker or Podman starts.

    Args:
        image: name of the image, which must contain `sh`, `cat`, `mkdir`, `dirname` and `kill`; or the `Path` of a
            folder with a Dockerfile to build the image from. Docker caches the build.
        program: `docker` or `podman`.
        folder: working folder, which is created; None uses the working folder of the image.
        options: options of `docker run`, such as `["--memory", "2g"]`. They replace the default,
            which disables the network.

    Raises:
        FileNotFoundError: if the program is not installed.

    Example:
        >>> sandboxes = Sandboxes(lambda: ContainerSandbox("debian:12-slim"))               # doctest: +SKIP
    """

    def __init__(
        self,
        image: str | Path,
        *,
        program: str = "docker",
        folder: str | None = "/work",
        options: Sequence[str] = ("--network", "none"),
    ) -> None:
        super().__init__()
        if shutil.which(program) is None:
            raise FileNotFoundError(f"the program {program!r}, which runs the containers, is not installed.")
        self._image = image
        self._program = program
        self._options = [*(["--workdir", folder] if folder is not None else []), *options]

    def _inside(self, argv: Sequence[str]) -> list[str]:
        return [self._program, "exec", "--interactive", self._name, *argv]

    async def start(self) -> None:
        """Build the image if a folder was given, and start the container. Raises OSError if that fails."""
        image = str(self._image)
        if isinstance(self._image, Path):
            image = (await self._told(["build", "--quiet", image], 1800)).split()[-1]
        waits = ["--init", "--entrypoint", "sh", image, "-c", "while :; do sleep 3600; done"]
        await self._told(["run", "--detach", "--rm", "--name", self._name, *self._options, *waits], 600)

    async def _told(self, words: Sequence[str], timeout: float) -> str:
        code, out, err, timed_out = await _run([self._program, *words], timeout)
        if code or timed_out:
            why = f"took more than {timeout:g} s" if timed_out else err.decode(errors="replace").strip()[-1000:]
            raise OSError(errno.EIO, f"{self._program} {words[0]} failed: {why}")
        return out.decode()

    async def close(self) -> None:
        """Remove the container."""
        await _run([self._program, "rm", "--force", self._name], _GRACE_SECONDS)


class SSHSandbox(_CommandSandbox):
    """A sandbox in its own folder on another machine, through the command `ssh`, with the rights of the remote user.

    Args:
        host: destination, as for `ssh`: `user@host`, or a name from `~/.ssh/config`. `ssh` runs
            without prompts, so it needs a key, and must know the host's identity.
        options: further options of `ssh`, such as `["-p", "2222"]`.

    Raises:
        FileNotFoundError: if `ssh` is not installed.
        ValueError: if `host` begins with `-`.

    Example:
        >>> sandboxes = Sandboxes(lambda: SSHSandbox("worker@sandbox-7"))                   # doctest: +SKIP
    """

    def __init__(self, host: str, *, options: Sequence[str] = ()) -> None:
        super().__init__()
        if shutil.which("ssh") is None:
            raise FileNotFoundError("the program 'ssh' is not installed.")
        if host.startswith("-"):
            raise ValueError(f"host must be a name, got {host!r}, which ssh reads as an option.")
        self._ssh = ["ssh", "-T", "-o", "BatchMode=yes", *options, host]
        self._folder = f"/tmp/{self._name}"

    def _inside(self, argv: Sequence[str]) -> list[str]:
        # The remote shell leads a process group and reads one line; the command replaces the shell.
        return [*self._ssh, f"cd {self._folder} && exec {shlex.join(argv)}"]

    async def start(self) -> None:
        """Create the folder. Raises OSError if the machine does not answer."""
        code, _, err, timed_out = await _run([*self._ssh, f"mkdir -m 700 {self._folder}"], 6 * _GRACE_SECONDS)
        if code or timed_out:
            raise OSError(errno.EIO, f"{self._ssh[-1]} does not answer: {err.decode(errors='replace').strip()}")

    async def close(self) -> None:
        """Remove the folder."""
        await _run([*self._ssh, f"rm -rf {self._folder} {self._folder}-*"], _GRACE_SECONDS)


async def _run(
    command: Sequence[str],
    timeout: float,
    stdin: bytes = b"",
    *,
    max_output: int | None = MAX_OUTPUT,
    kill: Sequence[str] = (),
) -> tuple[int, bytes, bytes, bool]:
    """Run a local command; return its exit code, output, errors, and whether it exceeded `timeout`.

    At the timeout, or if this coroutine is cancelled, the command `kill`, which ends the processes
    in the sandbox, runs before the local process is killed.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
    )
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    kept = [bytearray(), bytearray()]
    work = asyncio.gather(
        write_input(process.stdin, stdin),
        _read(process.stdout, kept[0], max_output),
        _read(process.stderr, kept[1], max_output),
        process.wait(),
    )
    try:
        timed_out = not (await asyncio.wait([work], timeout=timeout))[0]
    finally:
        if not work.done():
            if kill:
                await _run(kill, _GRACE_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # Wait for the end of the output with a limit: another process may keep the pipes open.
            if not (await asyncio.wait([work], timeout=_GRACE_SECONDS))[0]:
                work.cancel()
                process._transport.close()  # type: ignore[attr-defined]  # the only way to close the pipes
                await asyncio.sleep(0)
    code = -signal.SIGKILL if process.returncode is None else process.returncode
    return code, bytes(kept[0]), bytes(kept[1]), timed_out


async def _read(stream: asyncio.StreamReader, kept: bytearray, most: int | None) -> None:
    """Keep the first `most` bytes, and read the rest, so that no full pipe blocks the command."""
    while part := await stream.read(1 << 16):
        if most is not None:
            part = part[: max(0, most - len(kept))]
        kept += part
