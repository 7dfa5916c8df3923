"""`command`: a program that runs as an agent, in a temporary folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import string
import tempfile
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from llmrl._utils.arguments import check_positive
from llmrl._utils.asynchronous import awaited, write_input
from llmrl._utils.types import Row
from llmrl.endpoint.agent import AgentModel, AgentTimeout, Score
from llmrl.envs.row_template import filled, names_in
from llmrl.sandbox.reaper import reaping

_MAX_OUTPUT_BYTES = 1 << 16
_MAX_WORD_BYTES = (128 << 10) - 1
"""Linux's size limit for one argument."""
_TERM_SECONDS = 3.0
"""Seconds between SIGTERM and SIGKILL."""
_REAP_SECONDS = 10.0
"""Maximum time until all processes have ended after SIGKILL."""
_MODEL_FIELDS = ("base_url", "api_key", "model")


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a program."""

    exit_code: int
    output: str
    """End of its standard output and standard error."""
    folder: Path
    """Its working folder, which is deleted after scoring."""


class CommandFailed(RuntimeError):
    """Raised if a program ends with an exit code that means failure."""


ScoreCommand = Callable[[Row, CommandResult], Score | Awaitable[Score]]


def command(
    text: str,
    *,
    env: Mapping[str, str | None] | None = None,
    inherit: Collection[str] | None = None,
    stdin: str | None = None,
    files: Mapping[str, str] | None = None,
    folder: str | Path | None = None,
    exit_codes: Collection[int] | None = None,
    timeout_seconds: float = 600.0,
    score: ScoreCommand | None = None,
) -> Command:
    """Return a program as an agent for `AgentEnv`.

    The environment variables `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `OPENAI_MODEL` and their `ANTHROPIC` counterparts
    point to the model. The program runs in a temporary folder, without a shell and without a sandbox. Its exit code and
    the end of its output are stored in the rollout's record. The program and all its descendants are stopped when it
    exits, when the rollout ends, or at the time limit, which truncates the rollout.

    In `env`, `stdin` and `files`, `{NAME}` is a column of the row, as text or JSON, and `{row}` the
    whole row as JSON; `{base_url}`, `{api_key}` and `{model}` describe the model. Other braces are
    left as they are, and `{{NAME}}` is `{NAME}`.

    Args:
        text: the command line, split as by a shell; `{NAME}` is replaced with that column of the
            row, which must be short: programs take long texts from `stdin` or `files`.
        env: further environment variables; None removes one.
        inherit: names of the environment variables that the program inherits from this process; all by default.
        stdin: standard input; empty by default.
        files: contents of files in the program's folder, by relative path.
        folder: folder to copy into the program's folder.
        exit_codes: exit codes that mean success; any other makes the rollout an error. By default, all are scored.
        score: a plain or async function that returns the rollout's score from the row and a `CommandResult`.

    Example:
        >>> command("mini -t {query} -y", env={"MSWEA_MODEL_NAME": "openai/{model}"}).columns
        ('query',)
        >>> command("solve task.md", files={"task.md": "{query}"}).columns
        ('query',)
    """
    return Command(text, env or {}, inherit, stdin, files or {}, folder, exit_codes, timeout_seconds, score)


class Command:
    """The agent that `command` returns."""

    def __init__(
        self,
        text: str,
        env: Mapping[str, str | None],
        inherit: Collection[str] | None,
        stdin: str | None,
        files: Mapping[str, str],
        folder: str | Path | None,
        exit_codes: Collection[int] | None,
        timeout_seconds: float,
        score: ScoreCommand | None,
    ) -> None:
        self._words = shlex.split(text)
        if not self._words:
            raise ValueError("the command is empty; give a program and its arguments.")
        check_positive(timeout_seconds=timeout_seconds)
        for name in files:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"files must have relative paths in the program's folder, got {name!r}.")
        if isinstance(inherit, str):
            raise TypeError(f"inherit must be a list of names of environment variables, got {inherit!r}.")
        if folder is not None and not Path(folder).is_dir():
            raise FileNotFoundError(f"folder must be an existing folder to copy, got {str(folder)!r}.")
        self._env = dict(env)
        self._inherit = None if inherit is None else frozenset(inherit)
        self._stdin = stdin
        self._files = dict(files)
        self._folder = None if folder is None else Path(folder).absolute()
        self._exit_codes = None if exit_codes is None else frozenset(exit_codes)
        self._timeout_seconds = timeout_seconds
        self._score = score
        fields = [name for word in self._words for _, name, _, _ in string.Formatter().parse(word) if name is not None]
        templates = (stdin, *files.values(), *env.values())
        named = (name for template in templates if template is not None for name in names_in(template))
        fields += [name for name in named if name not in (*_MODEL_FIELDS, "row")]
        self.columns = tuple(dict.fromkeys(fields))
        """Columns of the dataset that the command reads by name."""

    def check_columns(self, available: Collection[str]) -> None:
        """Raise ValueError if the dataset lacks a column that the command reads."""
        if missing := [name for name in self.columns if name not in available]:
            raise ValueError(
                f"the command reads the columns {missing}, but the dataset has {sorted(available)}; double braces that "
                "are not placeholders, as in {{NAME}}."
            )

    async def __call__(self, row: Row, model: AgentModel) -> Score:
        """Run the program on a row and score its result.

        Raises AgentTimeout at the time limit, CommandFailed for an exit code that means failure,
        ValueError if an argument is too long or a link leads a file out of the folder, and
        FileNotFoundError if there is no such program.
        """
        words = [word.format_map(row) for word in self._words]
        for template, word in zip(self._words, words, strict=True):
            if (size := len(word.encode(errors="replace"))) > _MAX_WORD_BYTES:
                raise ValueError(
                    f"the argument {template!r} has {size} bytes, but a program takes at most {_MAX_WORD_BYTES}: "
                    f"pass it as stdin={template!r} or files={{'task.txt': {template!r}}}."
                )
        fields = {"base_url": model.base_url, "api_key": model.api_key, "model": model.name}
        inherited = {name: value for name, value in os.environ.items() if self._is_inherited(name)}
        variables = {**inherited, **model.environment()}
        for name, value in self._env.items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = filled(value, row, fields)
        stdin = None if self._stdin is None else filled(self._stdin, row, fields).encode(errors="replace")
        with tempfile.TemporaryDirectory(prefix="llmrl-agent-", ignore_cleanup_errors=True) as folder:
            await asyncio.to_thread(self._prepare, Path(folder), row, fields)
            program = str(Path(folder, words[0])) if os.sep in words[0] else words[0]
            if shutil.which(program, path=variables.get("PATH", os.defpath)) is None:
                raise FileNotFoundError(f"there is no program {words[0]!r} to run, in PATH or the program's folder.")
            exit_code, output = await self._run(words, folder, variables, stdin, model.info)
            if self._exit_codes is not None and exit_code not in self._exit_codes:
                raise CommandFailed(
                    f"{words[0]} ended with exit code {exit_code}, expected one of {sorted(self._exit_codes)}; its "
                    f"output ends with: {output[-500:].strip()}"
                )
            if self._score is None:
                return None
            result = CommandResult(exit_code, output, Path(folder))
            return await awaited(await asyncio.to_thread(self._score, row, result))

    def _is_inherited(self, name: str) -> bool:
        return self._inherit is None or name in self._inherit

    def _prepare(self, folder: Path, row: Row, fields: Mapping[str, str]) -> None:
        if self._folder is not None:
            shutil.copytree(self._folder, folder, symlinks=True, dirs_exist_ok=True)
        for name, template in self._files.items():
            path = folder / name
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"files has {name!r}, which symbolic links of the folder lead to {str(path.resolve())!r}; choose a "
                    "path that stays in the program's folder, or remove the link."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(filled(template, row, fields), errors="replace")

    async def _run(
        self, words: list[str], folder: str, variables: dict[str, str], stdin: bytes | None, info: dict[str, object]
    ) -> tuple[int, str]:
        """Return the program's exit code and the end of its output, which are also written to `info`."""
        end, ending = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *reaping(words, end=end, term_seconds=_TERM_SECONDS),
                cwd=folder,
                env=variables,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(ending)
            raise
        finally:
            os.close(end)
        assert process.stdout is not None
        output = bytearray()
        tasks = [asyncio.create_task(_read_end(process.stdout, output))]
        if process.stdin is not None and stdin is not None:
            tasks.append(asyncio.create_task(write_input(process.stdin, stdin)))
        try:
            async with asyncio.timeout(self._timeout_seconds):
                exit_code = await process.wait()  # its descendants have ended then, too
                await tasks[0]
        except TimeoutError:
            raise AgentTimeout(f"{words[0]} took more than {self._timeout_seconds:g} s.") from None
        finally:
            await _end(process, ending)
            for task in tasks:
                task.cancel()
            info["output"] = text = output.decode(errors="replace")
            if process.returncode is not None:
                info["exit_code"] = process.returncode
        return exit_code, text


async def _read_end(stream: asyncio.StreamReader, output: bytearray) -> None:
    """Read a stream to its end into `output`, which keeps the last bytes."""
    while part := await stream.read(_MAX_OUTPUT_BYTES):
        output += part
        del output[:-_MAX_OUTPUT_BYTES]


async def _end(process: asyncio.subprocess.Process, ending: int) -> None:
    """Make the process of `reaping` end the program and its descendants, wait for it, and close the pipe."""
    with contextlib.suppress(OSError):
        os.write(ending, b"x")
    os.close(ending)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TERM_SECONDS + _REAP_SECONDS):
            await process.wait()
            return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
