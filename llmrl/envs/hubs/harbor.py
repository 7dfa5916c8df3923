"""`HarborEnv`: tasks in the format of Harbor or terminal-bench, played in sandboxes."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import posixpath
import re
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Unpack

from torchrl.envs import TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.numbers import finite_number
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.hubs.harbor_tasks import BadTask, HarborTask, Stage, read_tasks
from llmrl.envs.sampler import DrawOptions
from llmrl.rewards import RewardFn, Rubric
from llmrl.sandbox.base import Sandbox, SandboxResult
from llmrl.sandbox.command import ContainerSandbox
from llmrl.sandbox.confined import ConfinedSandbox
from llmrl.sandbox.launch import PythonLimits
from llmrl.sandbox.service import PythonExecutorService
from llmrl.tools import ConversationSandbox, InstanceTools, StopSignal, ToolTransform
from llmrl.transforms import RubricReward

MakeSandbox = Callable[[str | Path], Sandbox]
"""Function that creates a sandbox from the name of an image or the folder of a Dockerfile."""

_LINKED = ("/app", "/logs", "/solution", "/tests")
_LOGS = ("/logs/verifier", "/logs/agent", "/logs/artifacts")
_PROGRAMS = ("docker", "podman")
_UPLOAD = ".llmrl-upload.tar"
_UPLOAD_SECONDS = 120.0
_MAX_CALL_SECONDS = 3600.0
_STATUS = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_SUMMARY = re.compile(r"=+ short test summary info =+")
_GOOD = ("PASSED", "SKIPPED", "XFAIL")


class VerifierError(RuntimeError):
    """A task's tests gave no reward: they took too long, or did not write a number."""


class HarborEnv(KnownArguments, TransformedEnv):
    """Tasks in the format of Harbor or terminal-bench: an instruction, a sandbox with a shell, and tests.

    The model works with the tools `shell` and `file_read` until it answers without a tool call. Only then are the tests
    copied into the sandbox, or into a separate one if the task requests it, and run. The reward is read from
    `/logs/verifier/reward.txt` or `reward.json`, or from pytest's summary for tasks of terminal-bench.

    Args:
        folder: folder of a task or of several tasks; its subfolder with the name of `split` is used if it exists.
        sandbox: function that creates a sandbox from the name of an image or the folder of a Dockerfile, such as
            `ContainerSandbox`, or `"docker"` or `"podman"` for containers without network. By default, tasks that need
            no image are played in a confined sandbox with the programs of this machine.
        rewards: weights of the entries of `reward.json`, which are normalised. By default the entry
            `reward`, or the only one.
        **draws: see `DatasetChatEnv`.

    Raises:
        BadTask: if a folder is not a task, or if its task cannot be played with this `sandbox`.
        IsolationError: if this machine cannot confine commands.

    Example:
        >>> HarborEnv("nowhere")
        Traceback (most recent call last):
        llmrl.envs.hubs.harbor_tasks.BadTask: there is no folder 'nowhere'; a folder of Harbor's tasks is expected.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        sandbox: MakeSandbox | str | None = None,
        rewards: Mapping[str, float] | None = None,
        split: str | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        folder = Path(folder)
        if split is not None and (folder / split).is_dir():
            folder = folder / split
        self.tasks = {task.name: task for task in read_tasks(folder)}
        """Tasks by name."""
        self._places = _Places(list(self.tasks.values()), sandbox)
        draws.setdefault("name", split or "train")
        rows = [{"query": task.instruction, "task": name} for name, task in self.tasks.items()]
        instances = InstanceTools(TaskSandbox, functools.partial(TaskSandbox, self.tasks, self._places))
        most = max(task.agent_seconds for task in self.tasks.values())
        tools = ToolTransform(instances.tools, timeout=min(most, _MAX_CALL_SECONDS) + _UPLOAD_SECONDS)
        weights = {"reward": 1.0} if rewards is None else rewards
        functions = [RewardFn(_Entry(name, rewards is None), name=name, weight=w) for name, w in weights.items()]
        super().__init__(DatasetChatEnv(rows, **draws).append_transform(tools), RubricReward(Rubric(*functions)))

    def play_solutions(self) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
        """Return, for each task that has a solution, the rewards of doing nothing and of that solution."""

        async def both(task: HarborTask) -> tuple[dict[str, float], dict[str, float]]:
            return await _rewards_of(task, self._places, False), await _rewards_of(task, self._places, True)

        async def play() -> dict[str, tuple[dict[str, float], dict[str, float]]]:
            return {name: await both(task) for name, task in self.tasks.items() if task.solution is not None}

        return run_sync(play())


class TaskSandbox(ConversationSandbox):
    """A conversation's sandbox, with the model's tools in it."""

    def __init__(self, tasks: Mapping[str, HarborTask], places: _Places) -> None:
        self._tasks = tasks
        self._places = places
        self._verified: asyncio.Future[dict[str, float]] | None = None

    async def reset(self, task: str = "") -> None:
        """Start the sandbox of a task."""
        self.task = self._tasks[task]
        self.sandbox: _Place = self._places.agent(self.task)
        await self.sandbox.start()

    async def _rewards(self) -> dict[str, float]:
        """Return the rewards of the tests, which run only once."""
        if self._verified is None:
            self._verified = asyncio.ensure_future(_verify(self.task, self.sandbox, self._places))
        return await self._verified


class _Entry:
    """Reward function of one entry of a task's rewards."""

    def __init__(self, name: str, is_only: bool) -> None:
        self._name = name
        self._is_only = is_only

    async def __call__(self, task_sandbox: TaskSandbox) -> float:
        rewards = await task_sandbox._rewards()
        if self._name in rewards:
            return rewards[self._name]
        if self._is_only and len(rewards) == 1:
            return next(iter(rewards.values()))
        raise VerifierError(f"the tests gave {sorted(rewards)}, but no {self._name!r}: name entries by rewards={{…}}.")


class _Place:
    """A sandbox with the working folder, environment variables, files and time limit of a task's stage."""

    def __init__(self, sandbox: Sandbox, stage: Stage, seconds: float, *, is_cage: bool) -> None:
        self._sandbox = sandbox
        self._stage = stage
        self._is_cage = is_cage
        self.seconds = seconds
        """Time left for the agent's commands, in seconds; the model's generation does not count."""

    async def start(self) -> None:
        await self._sandbox.start()
        folders = [*_LOGS, "/tests", "/solution", self._stage.workdir]
        if self._is_cage:
            # In a confined sandbox, these folders are links to folders of the same name in its working folder.
            await self._told(["mkdir", "-p", *(f".{folder}" for folder in folders)])
            for source, target in self._stage.copies:
                await self.upload(source, target)
        else:
            await self._told(["mkdir", "-p", *folders])

    async def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float = 30.0) -> SandboxResult:
        """Run a command of the agent within the time left."""
        if self.seconds <= 0:
            raise StopSignal("The time for this task is over.")
        began = time.monotonic()
        try:
            return await self.execute(argv, {}, stdin=stdin, timeout=min(timeout, self.seconds))
        finally:
            self.seconds -= time.monotonic() - began

    async def execute(
        self, argv: Sequence[str], variables: Mapping[str, str], *, timeout: float, stdin: bytes = b""
    ) -> SandboxResult:
        """Run a command in the stage's working folder, with the stage's and further environment variables."""
        given = {**self._stage.env, **variables}
        if self._is_cage:
            given["PATH"] = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin"
        words = ["env", *(f"{name}={value}" for name, value in given.items())]
        words += ["sh", "-c", 'cd "$0" && exec "$@"', self._stage.workdir, *argv]
        return await self._sandbox.run(words, stdin=stdin, timeout=timeout)

    async def put(self, path: str, data: bytes) -> None:
        await self._sandbox.put(posixpath.join(self._stage.workdir, path), data)

    async def get(self, path: str) -> bytes:
        return await self._sandbox.get(posixpath.join(self._stage.workdir, path))

    async def close(self) -> None:
        await self._sandbox.close()

    async def upload(self, source: Path, target: str) -> None:
        """Copy a file, or the content of a folder without `__pycache__`, to an absolute path."""
        folder, name = posixpath.split(target)
        files = [source]
        if source.is_dir():
            folder, name, files = target, "", sorted(source.iterdir())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for file in files:
                archive.add(file, name or file.name, filter=_without_caches)
        await self.unpack(packed.getvalue(), folder)

    async def unpack(self, data: bytes, folder: str) -> None:
        """Unpack an archive into a folder."""
        await self._sandbox.put(_UPLOAD, data)
        made = f".{folder}" if self._is_cage else folder
        script = 'mkdir -p "$1" && tar -xf "$0" --no-same-owner -C "$1" && rm "$0"'
        await self._told(["sh", "-c", script, _UPLOAD, made])

    async def pack(self, paths: Sequence[str]) -> bytes:
        """Return a tar archive of the paths that exist."""
        script = 'for path; do if [ -e "$path" ]; then echo "$path"; fi; done | tar -chf "$0" -P -T -'
        await self._told(["sh", "-c", script, _UPLOAD, *paths])
        return await self._sandbox.get(_UPLOAD)

    async def _told(self, argv: Sequence[str]) -> None:
        result = await self._sandbox.run(argv, timeout=_UPLOAD_SECONDS)
        if result.exit_code:
            raise OSError(f"{argv[0]} failed in the sandbox: {result.stderr.strip()[-500:]}")


class _Places:
    """Factory of the sandboxes for the stages of tasks."""

    def __init__(self, tasks: Sequence[HarborTask], sandbox: MakeSandbox | str | None) -> None:
        if isinstance(sandbox, str):
            if sandbox not in _PROGRAMS:
                raise ValueError(f"sandbox must be one of {_PROGRAMS} or a function of an image, got {sandbox!r}.")
            sandbox = functools.partial(ContainerSandbox, program=sandbox, folder=None)
        self._make = sandbox
        if sandbox is not None:
            if without := next((task for task in tasks if task.agent.image is None), None):
                raise BadTask(f"the task {without.name!r} has neither an image nor a Dockerfile: leave out sandbox.")
            return
        if bound := [task for task in tasks if task.why_image]:
            raise BadTask(
                f"{len(bound)} of {len(tasks)} tasks need an image, the first is {bound[0].name!r}: "
                f"{bound[0].why_image}. Pass sandbox='docker', or a function that creates a sandbox from an image."
            )
        stages = [stage for task in tasks for stage in task.stages]
        targets = [path for stage in stages for path in (stage.workdir, *(target for _, target in stage.copies))]
        tops = {f"/{path.split('/')[1]}" for path in targets}
        self._links = tuple(sorted({*_LINKED, *tops} - {"/tmp"}))
        self._seconds = max(max(task.agent_seconds, task.verifier_seconds) for task in tasks)
        shared_cages(self._links, self._seconds)  # raises IsolationError early

    def agent(self, task: HarborTask) -> _Place:
        """Return the sandbox of a task's agent."""
        return self._place(task.agent, task.agent_seconds)

    def verifier(self, task: HarborTask) -> _Place:
        """Return the sandbox of a task's separate verifier."""
        assert task.verifier is not None
        return self._place(task.verifier, task.verifier_seconds)

    def _place(self, stage: Stage, seconds: float) -> _Place:
        if self._make is None:
            return _Place(ConfinedSandbox(shared_cages(self._links, self._seconds)), stage, seconds, is_cage=True)
        assert stage.image is not None
        return _Place(self._make(stage.image), stage, seconds, is_cage=False)


@functools.cache
def shared_cages(links: tuple[str, ...], seconds: float) -> PythonExecutorService:
    """Return the service of confined sandboxes, which all environments of this process share."""
    limits = PythonLimits(
        cpu_seconds=seconds, num_processes=128, memory_bytes=2 << 30, file_bytes=256 << 20, folder_bytes=512 << 20
    )
    return PythonExecutorService(timeout=_UPLOAD_SECONDS, limits=limits, num_ready=2, links=links)


async def _rewards_of(task: HarborTask, places: _Places, is_solved: bool) -> dict[str, float]:
    """Return the rewards of a task's own solution, or of doing nothing."""
    place = places.agent(task)
    try:
        await place.start()
        if is_solved:
            assert task.solution is not None
            await place.upload(task.solution, "/solution")
            await _run_script(place, task.solve_command, task.solution_env, task.agent_seconds)
        return await _verify(task, place, places)
    finally:
        await place.close()


async def _verify(task: HarborTask, agent: _Place, places: _Places) -> dict[str, float]:
    """Copy the tests into the sandbox, run them, and return the rewards; raise VerifierError if they give none."""
    if task.verifier is None:
        return await _judge(task, agent)
    own = places.verifier(task)
    try:
        await own.start()
        await own.unpack(await agent.pack(["/logs/artifacts", *task.artifacts]), "/")
        return await _judge(task, own)
    finally:
        await own.close()


async def _judge(task: HarborTask, place: _Place) -> dict[str, float]:
    # Remove the agent's files, which must count neither as tests nor as rewards.
    await place.execute(
        ["sh", "-c", "rm -rf /logs/verifier/* /logs/verifier/.[!.]* /tests/* /tests/.[!.]*"],
        {},
        timeout=_UPLOAD_SECONDS,
    )
    if task.tests.is_dir():
        await place.upload(task.tests, "/tests")
    if task.is_scored_by_pytest:
        await place.upload(task.folder / "run-tests.sh", "/tests/")
    result = await _run_script(place, task.test_command, task.verifier_env, task.verifier_seconds)
    if result.timed_out:
        raise VerifierError(f"the tests of {task.name!r} took more than {task.verifier_seconds:g} s.")
    if task.is_scored_by_pytest:
        return {"reward": _pytest_reward(result.stdout)}
    for file, read in (("reward.json", _read_json), ("reward.txt", _read_text)):
        found = await place.execute(["cat", f"/logs/verifier/{file}"], {}, timeout=_UPLOAD_SECONDS)
        if found.exit_code == 0:
            return read(found.stdout, f"{file} of {task.name!r}")
    end = (result.stdout + result.stderr).strip()[-500:]
    raise VerifierError(f"the tests of {task.name!r} wrote no reward.txt or reward.json; their output ends with: {end}")


async def _run_script(
    place: _Place, command: Sequence[str], variables: Mapping[str, str], seconds: float
) -> SandboxResult:
    script = 'chmod +x "$1" 2>/dev/null; exec "$@"' if len(command) == 1 else 'exec "$@"'
    return await place.execute(["sh", "-c", script, "sh", *command], variables, timeout=seconds)


def _read_text(text: str, what: str) -> dict[str, float]:
    try:
        return {"reward": finite_number(float(text), what)}
    except ValueError:
        raise VerifierError(f"{what} must be a finite number, got {text!r:.100}.") from None


def _read_json(text: str, what: str) -> dict[str, float]:
    try:
        entries = json.loads(text)
        if not isinstance(entries, dict):
            entries = {"reward": entries}
        rewards = {str(name): finite_number(value, f"{name!r} in {what}") for name, value in entries.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise VerifierError(f"{what} must have finite numbers by name: {error}") from None
    if not rewards:
        raise VerifierError(f"{what} has no entry.")
    return rewards


def _pytest_reward(output: str) -> float:
    """Return 1 if `pytest -rA` lists tests, all of which passed, were skipped or failed as expected, else 0."""
    parts = _SUMMARY.split(output)
    if len(parts) == 1:
        return 0.0
    statuses = _STATUS.findall(parts[-1])
    return float(bool(statuses) and all(status in _GOOD for status in statuses))


def _without_caches(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in entry.name else entry
