"""Tools that run in a `Sandbox`: a shell, files, and Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.sandbox.base import Sandbox
from llmrl.sandbox.service import PythonResult
from llmrl.tools.output import ToolResult
from llmrl.tools.tool import InstanceTools, Tool, ToolError

_MOST_SECONDS = 3600.0  # an upper bound; the transform's own limit is shorter


class ConversationSandbox:
    """A conversation's sandbox and its tools. Rewards read it as `conversation_sandbox`."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def reset(self) -> None:
        """Start the sandbox."""
        await self.sandbox.start()

    async def shell(self, command: str, timeout: float = 20.0) -> ToolResult:
        """Run a shell command.

        Args:
            command: what `sh` reads.
            timeout: seconds after which it is ended.
        """
        if not timeout > 0:  # also refuses NaN, which Python's JSON supports
            raise ToolError(f"timeout must be a positive number of seconds, got {timeout:g}.")
        told = await self.sandbox.run(["sh", "-c", command], timeout=min(timeout, _MOST_SECONDS))
        ending = f"[ended after {timeout:g} s]" if told.timed_out else f"[exit {told.exit_code}]"
        lines = (told.stdout.rstrip("\n"), told.stderr and f"[stderr]\n{told.stderr.rstrip()}", ending)
        return ToolResult.from_text("\n".join(filter(None, lines)), is_error=told.timed_out or told.exit_code != 0)

    async def file_read(self, path: str, max_bytes: int = 65536) -> str:
        """Read a file.

        Args:
            path: path of the file, from the folder in which commands run.
            max_bytes: how much of it at most.
        """
        try:
            return (await self.sandbox.get(path))[: max(max_bytes, 0)].decode(errors="replace")
        except OSError as error:
            raise ToolError(f"{path!r:.200} cannot be read: {error.strerror or error}.") from error

    async def close(self) -> None:
        """Close the sandbox."""
        await self.sandbox.close()


class Sandboxes:
    """One sandbox per conversation, shared by the tools made from it.

    Args:
        make: function that returns a new sandbox, such as `lambda: ConfinedSandbox(service)`.

    Example:
        >>> from llmrl.sandbox.confined import ConfinedSandbox
        >>> from llmrl.sandbox.service import PythonExecutorService
        >>> from llmrl.tools import ToolTransform
        >>> service = PythonExecutorService(num_ready=1)
        >>> sandboxes = Sandboxes(lambda: ConfinedSandbox(service))
        >>> sorted(ToolTransform([ShellTool(sandboxes), FileReadTool(sandboxes)]).tools)
        ['file_read', 'shell']
        >>> service.close()
    """

    def __init__(self, make: Callable[[], Sandbox]) -> None:
        instances = InstanceTools(ConversationSandbox, lambda: ConversationSandbox(make()))
        self.tools = {tool.name: replace(tool, keeps_opening_time=True) for tool in instances.tools}


def ShellTool(sandboxes: Sandboxes) -> Tool:
    """Return the tool `shell`, which runs commands in the conversation's sandbox."""
    return sandboxes.tools["shell"]


def FileReadTool(sandboxes: Sandboxes) -> Tool:
    """Return the tool `file_read`, which reads files of the conversation's sandbox."""
    return sandboxes.tools["file_read"]


class SandboxExecutor:
    r"""Runs Python in sandboxes, as the `executor` of a `PythonInterpreter`.

    Calls of one session share a sandbox and its files, but no variables. Other calls have a new one each.

    Args:
        make: function that returns a new sandbox.
        python: name of the Python program in the sandbox.
        timeout: seconds per call.

    Example:
        >>> from llmrl.sandbox.confined import ConfinedSandbox
        >>> from llmrl.sandbox.service import PythonExecutorService
        >>> service = PythonExecutorService(num_ready=1)
        >>> executor = SandboxExecutor(lambda: ConfinedSandbox(service))
        >>> asyncio.run(executor.run("print(6 * 7)")).stdout
        '42\n'
        >>> executor.close(); service.close()
    """

    def __init__(self, make: Callable[[], Sandbox], *, python: str = "python3", timeout: float = 10.0) -> None:
        self._make = make
        self._python = python
        self.timeout = timeout
        self._loop = BackgroundLoop("llmrl-sandboxes")
        self._sandboxes: dict[str, asyncio.Task[Sandbox]] = {}

    async def run(self, code: str, *, session: str | None = None, timeout: float | None = None) -> PythonResult:
        """Run code, from any event loop. The result reports errors of the code."""
        return await self._loop.wait(self._run(code, session, self.timeout if timeout is None else timeout))

    async def _run(self, code: str, session: str | None, timeout: float) -> PythonResult:
        if session is None:
            sandbox = await self._started()
        else:
            starting = self._sandboxes.get(session)
            if starting is None or (starting.done() and starting.exception() is not None):  # repeat it
                starting = self._sandboxes[session] = asyncio.create_task(self._started())
            sandbox = await asyncio.shield(starting)
        try:
            told = await sandbox.run([self._python, "-c", code], timeout=timeout)
        finally:
            if session is None:
                await sandbox.close()
        if told.timed_out:
            stderr = f"{told.stderr}The code ran longer than {timeout:g} s and was stopped.\n"
            return PythonResult(False, told.stdout, stderr, told.exit_code, "timeout")
        return PythonResult(told.exit_code == 0, told.stdout, told.stderr, told.exit_code)

    async def _started(self) -> Sandbox:
        sandbox = self._make()
        try:
            await sandbox.start()
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def release(self, session: str) -> None:
        """Close a session's sandbox; unknown sessions are ignored."""
        if not self._loop.is_closed:
            self._loop.submit(self._release(session))

    async def _release(self, session: str) -> None:
        if (starting := self._sandboxes.pop(session, None)) is not None:
            await (await starting).close()

    def close(self) -> None:
        """Close all sandboxes. May be called twice."""
        if not self._loop.is_closed:
            self._loop.run(self._close())
            self._loop.close()

    async def _close(self) -> None:
        await asyncio.gather(*map(self._release, list(self._sandboxes)), return_exceptions=True)
