"""`PythonExecutorService`: interpreters for many conversations at once, confined and started ahead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections import deque
from dataclasses import dataclass

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.sandbox import frames
from llmrl.sandbox.launch import LEVELS, Isolation, IsolationError, Launcher, PythonLimits

_logger = logging.getLogger("llmrl")
# The supervisor keeps the time; past this its silence is taken for its end.
_GRACE_SECONDS = 5.0
# A supervisor is there in milliseconds, where each starts Python in tenths of a second; on a machine under load longer.
_START_SECONDS = 30.0
# Interpreters that are tried before the service calls itself out of order.
_NUM_STARTS = 3


@dataclass(frozen=True, slots=True)
class PythonResult:
    """How a piece of code ended."""

    is_success: bool
    """It ran to its end, or exited with 0."""
    stdout: str
    stderr: str
    """Its standard error, its traceback, and what the service has to say about its end."""
    returncode: int
    """Exit code; negative, a signal."""
    reason: str = ""
    """`timeout` or `died` when the interpreter, and its variables, are gone."""

    def as_dict(self) -> dict[str, bool | int | str]:
        """Return it as TorchRL's service answers."""
        return {
            "success": self.is_success, "stdout": self.stdout, "stderr": self.stderr, "returncode": self.returncode,
        }  # fmt: skip


class _Interpreter:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.why_not = "the process that watches it ended"
        """Why it is not started, where it is not."""

    async def is_started(self) -> bool:
        """Return whether there is a supervisor; waits until it says so, or its end is seen. Asked once."""
        answer = await self._answer(_START_SECONDS)
        if answer is not None:
            self.why_not = answer.get("why", "")
        return not self.why_not

    async def run(self, code: str, timeout: float) -> frames.Answer | None:
        """Return what the supervisor answers; None when it is gone."""
        with contextlib.suppress(OSError):
            self._writer.write(frames.encode({"code": code, "timeout": timeout}))
        return await self._answer(timeout + _GRACE_SECONDS)

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
        """The interpreter that keeps the session's variables, while no call runs."""
        self.running: _Interpreter | None = None


class PythonExecutorService:
    r"""Runs untrusted Python.

    Each interpreter is a process of its own with limits, an empty environment, and a temporary home and working
    directory. What else confines it is a *level*: `namespaces` (no network, only Python's and the system's files and
    those read-only, its own process namespace; the kernel's means, used directly), `bubblewrap` (the same through the
    program `bwrap`, where only that is allowed to; slower to start), `process` (resource limits, Landlock where the
    kernel has it, and as root a user of its own). The level in force is logged once, and is in `isolation`. An
    interpreter that exceeds its time is killed with everything it started. Between calls it is frozen.

    Used as it is, or as a Ray actor shared by many machines.

    Args:
        pool_size: calls that run at the same time; further ones wait, without their time running.
        timeout: seconds that a call may take.
        isolation: a level that is required, or `auto`: the first that this machine allows.
        limits: limits of each interpreter.
        num_ready: interpreters started ahead.

    Raises:
        IsolationError: if the required level is not available here.
        ValueError: if an argument is out of its range.

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
    ) -> None:
        for name, value in (("pool_size", pool_size), ("timeout", timeout), ("num_ready", num_ready)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}.")
        if isolation not in ("auto", *LEVELS):
            raise ValueError(f"isolation must be 'auto' or one of {LEVELS}, got {isolation!r}.")
        self.pool_size = pool_size
        self.timeout = timeout
        self.num_ready = num_ready
        self.limits = PythonLimits() if limits is None else limits
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
        _logger.warning("Model-written Python runs with isolation %s.", self.description)

    @property
    def isolation(self) -> Isolation:
        """The level in force."""
        return self._launcher.level

    @property
    def description(self) -> str:
        """What holds at this level, in a sentence."""
        return self._launcher.describe()

    def _choose(self, isolation: Isolation) -> Launcher:
        refusals = []
        for level in LEVELS if isolation == "auto" else (isolation,):
            launcher = None
            try:
                launcher = Launcher(level, self.limits)
                if isolation == "auto" and launcher.gaps:
                    raise IsolationError(
                        f"it would leave {' and '.join(launcher.gaps)} open, so that code could reach this program's. "
                        "Install bubblewrap, or allow user namespaces; or accept it with isolation='process'."
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
        answer = await interpreter.run("import os, json", 20) if await interpreter.is_started() else None
        if answer is None or answer["returncode"] != 0:
            interpreter.close()
            reason = (answer["stderr"].strip() if answer else "") or interpreter.why_not or "its first call failed"
            raise IsolationError(f"an interpreter does not start: {reason}.")
        self._ready.append(interpreter)

    @staticmethod
    async def _open(launcher: Launcher) -> _Interpreter:
        # Unbounded, since the sender bounds its frames.
        return _Interpreter(*await asyncio.open_connection(sock=launcher.start(), limit=frames.MAX_FRAME_BYTES))

    def execute(
        self, code: str, session: str | None = None, timeout: float | None = None
    ) -> dict[str, bool | int | str]:
        """Run code and wait: `success`, `stdout`, `stderr`, `returncode`. See `run`."""
        return self._loop.run(self._run(code, session, timeout)).as_dict()

    async def run(self, code: str, *, session: str | None = None, timeout: float | None = None) -> PythonResult:
        """Run code, from any event loop; never raises for what the code does.

        Args:
            code: Python source.
            session: calls of one session share their variables, and run one after another; without one, each call
                has a fresh interpreter.
            timeout: seconds, instead of the service's.

        Raises:
            RuntimeError: after `close`.
        """
        return await self._loop.wait(self._run(code, session, timeout))

    async def _run(self, code: str, name: str | None, timeout: float | None) -> PythonResult:
        if self._is_closed:
            raise RuntimeError("this PythonExecutorService is closed.")
        session = _Session() if name is None else self._sessions.setdefault(name, _Session())
        async with session.lock, self._places:
            try:
                interpreter = session.interpreter or await self._take()
            except IsolationError as error:
                return PythonResult(False, "", f"The Python service is out of order: {error}", -1, "died")
            session.interpreter = None
            session.running = interpreter
            is_kept = False
            limit = self.timeout if timeout is None else timeout
            try:
                answer = await interpreter.run(code, limit)
                is_released = name is not None and self._sessions.get(name) is not session
                is_kept = answer is not None and answer["is_alive"] and name is not None and not is_released
            finally:
                # A call that is cancelled leaves code running: its interpreter ends with its socket.
                session.running = None
                if is_kept:
                    session.interpreter = interpreter
                else:
                    interpreter.close()
        return self._result(answer, limit, is_session=name is not None)

    def _result(self, answer: frames.Answer | None, timeout: float, *, is_session: bool) -> PythonResult:
        is_lost = answer is None
        if answer is None:
            answer = {
                "returncode": -9,
                "reason": "died",
                "stdout": "",
                "stderr": "",
                "num_left_processes": 0,
                "is_exit": False,
                "is_alive": False,
            }
        returncode = answer["returncode"]
        reason = answer["reason"]
        notes = []
        if is_lost:
            notes.append("The Python service lost this interpreter: it was released, or its supervisor was ended.")
        elif reason == "timeout":
            notes.append(f"The code ran longer than {timeout:g} s and was stopped.")
        elif reason == "died":
            notes.append(self._describe_end(returncode))
        elif answer["is_exit"]:
            notes.append(f"The code called sys.exit({returncode}).")
        if reason and is_session:
            notes.append("All variables are lost.")
        if answer["num_left_processes"]:
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
        raise IsolationError("what starts interpreters ended before it had started one.")

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
        """Sessions that hold an interpreter or wait for one."""
        return len(self._sessions)

    def release(self, session: str) -> None:
        """End a session: its interpreter and all it started, a call that runs included. Unknown ones are none."""
        if not self._is_closed:
            self._loop.loop.call_soon_threadsafe(self._release, session)

    def _release(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for interpreter in (session.interpreter, session.running):
            if interpreter is not None:
                interpreter.close()
        session.interpreter = None

    def close(self) -> None:
        """End every interpreter. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.run(self._close())
        self._launcher.close()
        self._loop.close()

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
