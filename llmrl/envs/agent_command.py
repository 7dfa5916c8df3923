"""`command`: a program as an agent, in a folder of its own, ended with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shlex
import signal
import string
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrl._utils.types import Row
from llmrl.endpoint.agent import AgentModel, AgentTimeout, Score

_MAX_OUTPUT_BYTES = 1 << 16
_TERM_SECONDS = 3.0
"""Time, in seconds, for a program to end by itself after SIGTERM."""
_MARK = "LLMRL_AGENT_COMMAND"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a program."""

    exit_code: int
    output: str
    """The end of its output, with its errors."""
    folder: Path
    """Its working folder, which is removed after scoring."""


ScoreCommand = Callable[[Row, CommandResult], Score | Awaitable[Score]]


def command(
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
    score: ScoreCommand | None = None,
) -> Command:
    """Return a program as an agent for `AgentEnv`.

    It finds the model in its environment: `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL`, and the same of
    `ANTHROPIC`. It runs in an empty folder, without a shell and without confinement. Its exit code and the end of its
    output are in the rollout's record. It and all that it started are ended when it exits, at its time limit, which
    truncates the rollout, and when the rollout ends.

    Args:
        text: its words, as a shell splits them; `{NAME}` within one is the row's column of that name.
        env: further variables, in which `{base_url}`, `{api_key}` and `{model}` are replaced.
        timeout_seconds: time limit of the program.
        score: a function, plain or async, of the row and a `CommandResult`, that returns the rollout's score; it may
            look into the folder. Plain ones have a thread.

    Raises:
        ValueError: if the command is empty, or if the limit is not positive.

    Example:
        >>> command("mini -t {query} -y", env={"MSWEA_MODEL_NAME": "openai/{model}"}).columns
        ('query',)
    """
    return Command(text, env or {}, timeout_seconds, score)


class Command:
    """The agent that `command` returns."""

    def __init__(self, text: str, env: Mapping[str, str], timeout_seconds: float, score: ScoreCommand | None) -> None:
        self._words = shlex.split(text)
        if not self._words:
            raise ValueError("the command is empty; give a program and its arguments.")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds}.")
        self._env = dict(env)
        self._timeout_seconds = timeout_seconds
        self._score = score
        fields = (name for word in self._words for _, name, _, _ in string.Formatter().parse(word) if name is not None)
        self.columns = tuple(dict.fromkeys(fields))
        """Columns of the dataset in the command."""

    def check_columns(self, available: Collection[str]) -> None:
        """Check that the dataset has the columns in the command.

        Raises:
            ValueError: if one is missing; the message names it and the columns.
        """
        if missing := [name for name in self.columns if name not in available]:
            raise ValueError(
                f"the command reads {missing}, and the dataset has {sorted(available)}; write braces that stand for "
                "themselves twice."
            )

    async def __call__(self, row: Row, model: AgentModel) -> Score:
        """Run the program on a row, and score its result.

        Raises:
            AgentTimeout: when it took too long.
            OSError: if it cannot be started.
        """
        words = [word.format_map(row) for word in self._words]
        fields = {"base_url": model.base_url, "api_key": model.api_key, "model": model.name}
        more = {name: value.format_map(fields) for name, value in self._env.items()}
        mark = uuid.uuid4().hex
        variables = {**os.environ, **model.environment(), **more, _MARK: mark}
        with tempfile.TemporaryDirectory(prefix="llmrl-agent-", ignore_cleanup_errors=True) as folder:
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=folder,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
            assert process.stdout is not None
            tail = _Tail()
            reading = asyncio.create_task(tail.read(process.stdout))
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    exit_code = await process.wait()
                    await asyncio.wait({reading}, timeout=1.0)  # something that it started may hold the other end
            except TimeoutError:
                raise AgentTimeout(f"{words[0]} took more than {self._timeout_seconds:g} s.") from None
            finally:
                await _end(process, mark)
                reading.cancel()
                model.info["output"] = tail.text
                if process.returncode is not None:
                    model.info["exit_code"] = process.returncode
            if self._score is None:
                return None
            return await self._scored(row, CommandResult(exit_code, tail.text, Path(folder)))

    async def _scored(self, row: Row, result: CommandResult) -> Score:
        assert self._score is not None
        score = await asyncio.to_thread(self._score, row, result)
        return await score if inspect.isawaitable(score) else score


class _Tail:
    """The end of a program's output."""

    def __init__(self) -> None:
        self._bytes = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(_MAX_OUTPUT_BYTES):
            self._bytes = (self._bytes + part)[-_MAX_OUTPUT_BYTES:]

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """End a program and its descendants: by SIGTERM first, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        found = await asyncio.to_thread(_processes, mark)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if process.returncode is not None and not found:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TERM_SECONDS):
                await process.wait()
                while await asyncio.to_thread(_processes, mark):
                    await asyncio.sleep(0.05)
                return


def _processes(mark: str) -> list[int]:
    """Return the processes that inherited a mark in their environment, in whatever group or session (Linux)."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
