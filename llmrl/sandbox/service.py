"""`PythonExecutorService`: a pool of confined interpreters for many conversations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from llmrl._utils.arguments import check_positive
from llmrl._utils.background_loop import BackgroundLoop
from llmrl.sandbox import frames, kernel
from llmrl.sandbox.launch import LEVELS, Isolation, IsolationError, Launcher, PythonLimits

logger = logging.getLogger(__name__)
_ENVELOPE_BYTES = 1024  # for what is sent with the code
# The supervisor enforces the timeout; if it is silent for longer, it is considered dead.
_GRACE_SECONDS = 30.0
# Supervisors start in milliseconds, or tenths of a second if each starts Python; slower under load.
_START_SECONDS = 30.0
# Attempts to start an interpreter before the service reports a failure.
_NUM_STARTS = 3
_LOST: frames.Answer = {
    "returncode": -9, "is_exit": False, "reason": "died", "num_left_processes": 0, "stdout": "", "stderr": "",
}  # fmt: skip
"""Stands for the answer of a supervisor that is gone."""


@dataclass(frozen=True, slots=True)
class PythonResult:
    """Result of a piece of code."""

    is_success: bool
    """Whether the code finished or exited with 0."""
    stdout: str
    stderr: str
    """Standard error, the traceback, and the service's message about the end."""
    returncode: int
    """Exit code; negative for a signal."""
    reason: str = ""
    """`timeout` or `died` if the interpreter and its variables are lost."""

    def as_dict(self) -> dict[str, bool | int | str]:
        """Return the result in the format of TorchRL's service."""
        return {
            "success": self.is_success, "stdout": self.stdout, "stderr": self.stderr, "returncode": self.returncode,
        }  # fmt: skip


class _Interpreter:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.why_not = "its supervisor ended"
        """Reason why the interpreter has not started; empty if it has."""

    async def is_started(self) -> bool:
        """Wait for the supervisor, and return whether it has started. Called once."""
        answer = await self._answer(_START_SECONDS)
        if answer is not None:
            self.why_not = answer.get("why", "")
        return not self.why_not

    async def run(self, code: str, timeout: float) -> frames.Answer:
        """Return the supervisor's answer, or `_LOST` if it is gone."""
        with contextlib.suppress(OSError):
            self._writer.write(frames.encode({"code": code, "timeout": timeout}))
        return await self._answer(timeout + _GRACE_SECONDS) or _LOST

    async def _answer(self, timeout: float) -> frames.Answer | None:
        try:
            async with asyncio.timeout(timeout):
                header = await self._reader.readexactly(frames.HEADER.size)
                return frames.decode(await self._reader.readexactly(*frames.HEADER.unpack(header)))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, frames.BrokenFrame):
            return None

    def close(self) -> None:
        self._writer.close()


class _Session:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.interpreter: _Interpreter | None = None
        """Keeps the session's variables between calls."""
        self.running: _Interpreter | None = None


class PythonExecutorService:
    r"""Runs untrusted Python in confined interpreters.

    Each interpreter is a process with limits, an empty environment, and a temporary folder as home
    and working directory. The *level* of isolation, which is logged once, adds:

    - `namespaces`: no network, read-only access to the files of Python and the system, and its own processes;
    - `bubblewrap`: the same through the program `bwrap`, if only that is permitted; slower to start;
    - `process`: Landlock if the kernel has it, and its own user if this program is root.

    An interpreter that exceeds its time is killed with its child processes. Interpreters are frozen
    between calls. The service can also be a Ray actor shared by several machines.

    Args:
        pool_size: number of concurrent calls; further calls wait, and their timeout starts later.
        timeout: seconds per call.
        isolation: required level, or `auto` for the first level that this machine allows.
        limits: limits for the code; by default those of `PythonLimits()`.
        num_ready: number of interpreters started in advance.
        links: top-level folders, such as `/app`, that link to folders of the same name in the
            working folder; requires a level with its own file system.

    Raises:
        IsolationError: if the required level is unavailable.
        ValueError: if an argument is out of range.

    Example:
        >>> service = PythonExecutorService(num_ready=1)
        >>> service.execute("a = 7 * 6; print(a)")["stdout"]
        '42\n'
        >>> service.execute("x = 1", session="chat")["success"], service.execute("print(x)", session="chat")["stdout"]
        (True, '1\n')
        >>> service.close()
    """

    def __init__(
        self,
        pool_size: int = 32,
        timeout: float = 10.0,
        *,
        isolation: Isolation = "auto",
        limits: PythonLimits | None = None,
        num_ready: int = 8,
        links: Sequence[str] = (),
    ) -> None:
        check_positive(pool_size=pool_size, timeout=timeout, num_ready=num_ready)
        if isolation not in ("auto", *LEVELS):
            raise ValueError(f"isolation must be 'auto' or one of {LEVELS}, got {isolation!r}.")
        self.pool_size = pool_size
        self.timeout = timeout
        self.num_ready = num_ready
        self.limits = limits or PythonLimits()
        if bad := [link for link in links if not re.fullmatch(r"/[\w.-]+", link) or link in kernel.RESERVED]:
            raise ValueError(f"links must be top-level folders such as '/app', got {bad}.")
        self._links = tuple(links)
        self._loop = BackgroundLoop("llmrl-python")
        self._is_closed = False
        self._sessions: dict[str, _Session] = {}
        self._ready: deque[_Interpreter] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(pool_size)
        try:
            self._launcher = self._choose(isolation)
        except BaseException:
            self._loop.close()
            raise
        logger.warning("Model-written Python runs with isolation %s.", self.description)

    @property
    def isolation(self) -> Isolation:
        """Level of isolation in use."""
        return self._launcher.level

    @property
    def description(self) -> str:
        """Description of the isolation in one sentence."""
        return self._launcher.describe()

    def _choose(self, isolation: Isolation) -> Launcher:
        refusals = []
        for level in LEVELS if isolation == "auto" else (isolation,):
            launcher = None
            try:
                launcher = Launcher(level, self.limits, self._links)
                if isolation == "auto" and launcher.gaps:
                    raise IsolationError(
                        f"it does not confine {' and '.join(launcher.gaps)} here, so code could reach this program's. "
                        "Install bubblewrap, or allow user namespaces; or accept this with isolation='process'."
                    )
                self._loop.run(self._try(launcher))
                return launcher
            except IsolationError as error:
                refusals.append(f"{level}: {error}")
                if launcher is not None:
                    launcher.close()
        raise IsolationError("Model-written Python cannot be confined here. " + " ".join(refusals))

    async def _try(self, launcher: Launcher) -> None:
        interpreter = await self._open(launcher)
        answer = await interpreter.run("import os, json", 20) if await interpreter.is_started() else _LOST
        if answer["returncode"] != 0:
            interpreter.close()
            reason = answer["stderr"].strip() or interpreter.why_not or "its first call failed"
            raise IsolationError(f"an interpreter does not start: {reason}.")
        self._ready.append(interpreter)

    @staticmethod
    async def _open(launcher: Launcher) -> _Interpreter:
        # The sender limits the size of frames.
        return _Interpreter(*await asyncio.open_connection(sock=launcher.start(), limit=frames.MAX_FRAME_BYTES))

    def execute(
        self, code: str, session: str | None = None, timeout: float | None = None
    ) -> dict[str, bool | int | str]:
        """Run code and return `success`, `stdout`, `stderr` and `returncode`, as `run` does."""
        return self._loop.run(self._run(code, session, timeout)).as_dict()

    async def run(self, code: str, *, session: str | None = None, timeout: float | None = None) -> PythonResult:
        """Run code, from any event loop. The result has its errors. Raises RuntimeError after `close`.

        Args:
            session: calls of one session share variables and run in order; None uses a new interpreter.
            timeout: seconds; the service's timeout by default.
        """
        return await self._loop.wait(self._run(code, session, timeout))

    async def _run(self, code: str, name: str | None, timeout: float | None) -> PythonResult:
        if self._is_closed:
            raise RuntimeError("this PythonExecutorService is closed.")
        if len(frames.encode(code)) > frames.MAX_FRAME_BYTES - _ENVELOPE_BYTES:  # would end the interpreter
            why = f"The code and its input are longer than {frames.MAX_FRAME_BYTES >> 20} MiB, and were not run.\n"
            return PythonResult(False, "", why, 1)
        session = _Session() if name is None else self._sessions.setdefault(name, _Session())
        async with session.lock, self._places:
            try:
                interpreter = session.interpreter or await self._take()
            except IsolationError as error:
                return PythonResult(False, "", f"The Python service is out of order: {error}", -1, "died")
            session.interpreter = None
            session.running = interpreter
            is_kept = False
            if timeout is None:
                timeout = self.timeout
            try:
                answer = await interpreter.run(code, timeout)
                is_kept = not answer["reason"] and name is not None and self._sessions.get(name) is session
            finally:
                # A cancelled call leaves code running; closing the socket ends the interpreter.
                session.running = None
                if is_kept:
                    session.interpreter = interpreter
                else:
                    interpreter.close()
        return self._result(answer, timeout, is_session=name is not None)

    def _result(self, answer: frames.Answer, timeout: float, *, is_session: bool) -> PythonResult:
        returncode = answer["returncode"]
        reason = answer["reason"]
        notes = []
        if answer is _LOST:
            notes.append("The Python service lost this interpreter: it was released, or its supervisor was ended.")
        elif reason == "timeout":
            notes.append(f"The code ran longer than {timeout:g} s and was stopped.")
        elif reason == "died" and answer["num_left_processes"]:
            notes.append("Processes that the code left running kept starting more, so the interpreter was ended, too.")
        elif reason == "died":
            notes.append(self._describe_end(returncode))
        elif answer["is_exit"]:
            notes.append(f"The code called sys.exit({returncode}).")
        if reason and is_session:
            notes.append("All variables are lost.")
        if answer["num_left_processes"] and not reason:
            notes.append(f"Processes that the code left running were ended: {answer['num_left_processes']}.")
        stderr = answer["stderr"]
        if notes:
            stderr += ("\n" if stderr and not stderr.endswith("\n") else "") + " ".join(notes) + "\n"
        return PythonResult(not reason and returncode == 0, answer["stdout"], stderr, returncode, reason)

    def _describe_end(self, returncode: int) -> str:
        if returncode >= 0:
            return f"The code ended the interpreter (exit code {returncode})."
        if -returncode == signal.SIGXCPU:
            return f"The code used more than {self.limits.cpu_seconds:g} s of processor time and was stopped."
        name = signal.Signals(-returncode).name if -returncode in set(signal.Signals) else str(-returncode)
        return f"The interpreter was ended by signal {name}; perhaps the code used too much memory or stack."

    async def _take(self) -> _Interpreter:
        for _ in range(_NUM_STARTS):
            interpreter = self._ready.popleft() if self._ready else await self._start()
            if self._filling is None or self._filling.done():
                self._filling = asyncio.create_task(self._fill())
            if interpreter is not None:
                return interpreter
        raise IsolationError(f"the process that starts interpreters ended in each of {_NUM_STARTS} attempts.")

    async def _start(self) -> _Interpreter | None:
        interpreter = await self._open(self._launcher)
        is_started = False
        try:
            is_started = await interpreter.is_started()
        finally:
            if not is_started:
                interpreter.close()
        return interpreter if is_started else None

    async def _fill(self) -> None:
        with contextlib.suppress(IsolationError, OSError):
            while len(self._ready) < self.num_ready and (interpreter := await self._start()) is not None:
                self._ready.append(interpreter)

    @property
    def num_sessions(self) -> int:
        """Number of sessions that have an interpreter or wait for one."""
        return len(self._sessions)

    def release(self, session: str) -> None:
        """End a session with its interpreter, even during a call. Unknown sessions are ignored."""
        if not self._is_closed:
            self._loop.post(self._release, session)

    def _release(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for interpreter in (session.interpreter, session.running):
            if interpreter is not None:
                interpreter.close()
        session.interpreter = None

    def close(self) -> None:
        """End all interpreters. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.run(self._close())
        self._loop.close()  # cancels the calls in progress, which ends their interpreters
        self._launcher.close()

    async def _close(self) -> None:
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        for name in list(self._sessions):
            self._release(name)
        while self._ready:
            self._ready.popleft().close()
        await asyncio.sleep(0)

    cleanup = close
