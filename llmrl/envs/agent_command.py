"""`command`: a program as an agent, which runs in a temporary folder."""

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
"""Seconds between SIGTERM and SIGKILL."""
_MARK = "LLMRL_AGENT_COMMAND"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a program."""

    exit_code: int
    output: str
    """End of its standard output and standard error."""
    folder: Path
    """Its working folder, which is deleted after scoring."""


ScoreCommand = Callable[[Row, CommandResult], Score | Awaitable[Score]]


def command(
    text: str,
    *,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 600.0,
    score: ScoreCommand | None = None,
) -> Command:
    """Return a program as an agent for `AgentEnv`.

    The environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL` and their `ANTHROPIC` counterparts
    point to the model. The program runs in an empty folder, without a shell and without a sandbox. Its exit code and
    the end of its output are stored in the rollout's record. The program and its descendants are stopped when it
    exits, when the rollout ends, or at the time limit, which truncates the rollout.

    Args:
        text: the command line, split as by a shell; `{NAME}` is replaced with that column of the row.
        env: further environment variables, in which `{base_url}`, `{api_key}` and `{model}` are replaced.
        score: a plain or async function that returns the rollout's score from the row and a `CommandResult`.

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
        """Columns of the dataset that the command reads."""

    def check_columns(self, available: Collection[str]) -> None:
        """Raise ValueError if the dataset lacks a column that the command reads."""
        if missing := [name for name in self.columns if name not in available]:
            raise ValueError(
                f"the command reads {missing}, and the dataset has {sorted(available)}; write braces that stand for "
                "themselves twice."
            )

    async def __call__(self, row: Row, model: AgentModel) -> Score:
        """Run the program on a row and score its result; raise AgentTimeout at the time limit."""
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
                    await asyncio.wait({reading}, timeout=1.0)  # a descendant may keep the pipe open
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
    def __init__(self) -> None:
        self._bytes = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(_MAX_OUTPUT_BYTES):
            self._bytes = (self._bytes + part)[-_MAX_OUTPUT_BYTES:]

    @property
    def text(self) -> str:
        return self._bytes.decode(errors="replace")


async def _end(process: asyncio.subprocess.Process, mark: str) -> None:
    """Stop a program and its descendants, first with SIGTERM, then with SIGKILL."""
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
    """Return the ids of all processes that inherited the mark in their environment (Linux only)."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
