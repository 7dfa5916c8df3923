"""`check_sandbox`: tests an implementation of `llmrl.sandbox.base.Sandbox`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from llmrl.sandbox.base import Sandbox

_BINARY = bytes(range(256)) * 4096  # 1 MiB


async def check_sandbox(make: Callable[[], Sandbox]) -> None:
    """Test the sandboxes that `make` returns, a new one per call. Raises AssertionError if a check fails."""
    first = make()
    second = make()
    try:
        await asyncio.gather(first.start(), second.start())
        await _check_commands(first)
        await _check_files(first)
        await first.put("mine", b"1")
        _hold("sandboxes do not share files", (await second.run(["cat", "mine"])).exit_code != 0)
        await asyncio.gather(first.close(), first.close())
        _hold("closing one sandbox leaves the others running", (await second.run(["true"])).exit_code == 0)
    finally:
        await asyncio.gather(first.close(), second.close())
    await make().close()


async def _check_commands(sandbox: Sandbox) -> None:
    result = await sandbox.run(["sh", "-c", "cat; echo err >&2; exit 3"], stdin="é\n".encode())
    _hold(
        "exit code and both outputs are returned",
        (result.exit_code, result.stdout, result.stderr) == (3, "é\n", "err\n"),
    )
    result = await sandbox.run(["echo", "$HOME", "a b"])
    _hold("no shell reads the arguments", result.stdout == "$HOME a b\n")
    _hold("output that is not UTF-8 is also returned", (await sandbox.run(["printf", "\\377"])).exit_code == 0)
    result = await sandbox.run(["no-such-program"])
    _hold(
        "an unknown program leads to a result, not to an exception",
        result.exit_code != 0 and result.stderr != "" and not result.timed_out,
    )
    started = time.monotonic()
    result = await sandbox.run(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.5)
    _hold(
        "a command that takes too long is ended together with its child processes",
        result.timed_out and time.monotonic() - started < 30,
    )
    _hold("the sandbox works after a command took too long", (await sandbox.run(["true"])).exit_code == 0)
    results = await asyncio.gather(*(sandbox.run(["echo", str(number)]) for number in range(3)))
    _hold("commands may run concurrently", [result.stdout for result in results] == ["0\n", "1\n", "2\n"])


async def _check_files(sandbox: Sandbox) -> None:
    await sandbox.put("a/b/data.bin", _BINARY)
    _hold("a file is returned unchanged", await sandbox.get("a/b/data.bin") == _BINARY)
    result = await sandbox.run(["sh", "-c", "wc -c < a/b/data.bin; pwd > where"])
    _hold("commands find the files in their working directory", result.stdout.strip() == str(len(_BINARY)))
    _hold("a file that a command writes can be read", (await sandbox.get("where")).startswith(b"/"))
    await sandbox.put("a/b/data.bin", b"")
    _hold("a file is replaced", await sandbox.get("a/b/data.bin") == b"")
    try:
        await sandbox.get("nowhere")
    except FileNotFoundError:
        return
    _hold("an unknown file raises FileNotFoundError", False)


def _hold(what: str, is_so: bool) -> None:
    if not is_so:
        raise AssertionError(f"the sandbox breaks its contract: {what}.")
