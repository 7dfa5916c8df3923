"""`HarborTask`: a task, read from a folder in the format of Harbor or terminal-bench."""

from __future__ import annotations

import os
import posixpath
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrl._utils.numbers import finite_number

_FILES = ("task.toml", "task.yaml")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_PLAIN_IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?(?:ubuntu|debian|python|buildpack-deps)(?::[\w.-]+)?")
"""Images that only provide a shell, the usual programs and Python, so a task can be played without them."""
_INSTALLS = re.compile(r"^[^#\n]*?\b(apt|apt-get|apk|curl|wget|uvx|uv|pip3? install|npm)\b", re.MULTILINE)
_IGNORED = ("CMD", "ENTRYPOINT", "LABEL", "EXPOSE", "SHELL", "USER", "MAINTAINER", "STOPSIGNAL")
DEFAULT_WORKDIR = "/app"


class BadTask(ValueError):
    """A folder is not a task, or its task cannot be played here; the message names the folder."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Requirements of a task's stage (the agent's or the verifier's) for its sandbox."""

    image: str | Path | None
    """Name of an image, or the folder of a Dockerfile; None if the task has neither."""
    workdir: str
    copies: tuple[tuple[Path, str], ...] = ()
    """Sources and targets of the files and folders to copy if no image is built."""
    env: Mapping[str, str] = field(default_factory=dict)
    why_image: str = ""
    """Reason why the stage needs an image; empty if it needs none."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task: an instruction, a sandbox to work in, tests, and possibly a solution."""

    name: str
    folder: Path
    instruction: str
    agent: Stage
    verifier: Stage | None
    """Stage of a separate verifier; None if the tests run in the agent's sandbox."""
    tests: Path
    """Folder that is copied to `/tests`."""
    test_command: tuple[str, ...]
    agent_seconds: float
    verifier_seconds: float
    verifier_env: Mapping[str, str]
    artifacts: tuple[str, ...] = ()
    """Paths that are copied from the agent's sandbox to the separate verifier's."""
    solution: Path | None = None
    """Folder that is copied to `/solution`."""
    solve_command: tuple[str, ...] = ()
    solution_env: Mapping[str, str] = field(default_factory=dict)
    is_scored_by_pytest: bool = False
    """Whether the reward is computed from pytest's summary, as in terminal-bench, instead of read from a file."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The agent's stage, and that of a separate verifier."""
        return (self.agent,) if self.verifier is None else (self.agent, self.verifier)

    @property
    def why_image(self) -> str:
        """Reason why the task cannot be played without an image; empty if it can."""
        for stage in self.stages:
            if stage.why_image:
                return stage.why_image
        script = self.folder / self.test_command[-1].lstrip("/")
        path = script if script.is_file() else self.folder / script.name
        found = _INSTALLS.search(path.read_text(errors="replace"))
        return f"{path.name} calls {found[1]!r}, which needs a network" if found else ""


def read_tasks(folder: Path) -> list[HarborTask]:
    """Return the task of a folder, or the tasks of its subfolders in the order of their names.

    Raises BadTask if there is no task, or if a task is invalid.
    """
    if not folder.is_dir():
        raise BadTask(f"there is no folder {str(folder)!r}; a folder of Harbor's tasks is expected.")
    if _file_of(folder) is not None:
        return [read_task(folder)]
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and _file_of(path) is not None)
    if not folders:
        raise BadTask(f"{str(folder)!r} has no task: neither task.toml nor task.yaml is in it or a subfolder of it.")
    return [read_task(path) for path in folders]


def _bad(folder: Path, problem: str) -> BadTask:
    return BadTask(f"the task {str(folder)!r} {problem}")


def _file_of(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def read_task(folder: Path) -> HarborTask:
    """Return the task of a folder; raise BadTask if it is invalid."""
    file = _file_of(folder)
    assert file is not None
    try:
        if file.suffix == ".toml":
            return _harbor_task(folder, tomllib.loads(file.read_text()))
        import yaml

        return _terminal_bench_task(folder, yaml.safe_load(file.read_text()))
    except BadTask:
        raise
    except Exception as error:
        raise _bad(folder, f"cannot be read: {file.name}: {error}") from error


def _harbor_task(folder: Path, config: Mapping[str, Any]) -> HarborTask:
    environment = config.get("environment", {})
    verifier = config.get("verifier", {})
    is_separate = verifier.get("environment_mode", "separate" if "environment" in verifier else "shared") == "separate"
    for is_there, what in (
        (bool(config.get("steps")), "several steps"),
        (environment.get("os", "linux") != "linux", "an operating system other than Linux"),
        (bool(environment.get("mcp_servers")), "MCP servers"),
        (bool(verifier.get("collect")), "commands of verifier.collect"),
        ((folder / "environment" / "docker-compose.yaml").is_file(), "several containers (docker-compose.yaml)"),
        ((folder / "tests" / "docker-compose.yaml").is_file(), "several containers (docker-compose.yaml)"),
    ):
        if is_there:
            raise _bad(folder, f"has {what}, which llmrl does not support.")
    instruction = _text(folder, "instruction.md")
    _text(folder, "tests/test.sh")
    agent = _stage(folder / "environment", environment, DEFAULT_WORKDIR)
    own = None
    if is_separate:
        own_config = verifier.get("environment") or {}
        place = folder / "tests"
        if not own_config.get("docker_image") and not (place / "Dockerfile").is_file():
            place, own_config = folder / "environment", own_config or environment
        own = _stage(place, own_config, agent.workdir)
    has_solution = (folder / "solution" / "solve.sh").is_file()
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        agent=agent,
        verifier=own,
        tests=folder / "tests",
        test_command=("/tests/test.sh",),
        agent_seconds=_seconds(folder, config.get("agent", {}).get("timeout_sec", 600.0), "agent.timeout_sec"),
        verifier_seconds=_seconds(folder, verifier.get("timeout_sec", 600.0), "verifier.timeout_sec"),
        verifier_env=_variables(folder, verifier.get("env", {})),
        artifacts=_artifacts(folder, config.get("artifacts", [])),
        solution=folder / "solution" if has_solution else None,
        solve_command=("/solution/solve.sh",),
        solution_env=_variables(folder, config.get("solution", {}).get("env", {})),
    )


def _terminal_bench_task(folder: Path, config: Mapping[str, Any]) -> HarborTask:
    if (parser := config.get("parser_name", "pytest")) != "pytest":
        raise _bad(folder, f"has parser_name {parser!r}; only 'pytest' is supported.")
    instruction = config.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise _bad(folder, "has no instruction in task.yaml.")
    _text(folder, "run-tests.sh")
    return HarborTask(
        name=folder.name,
        folder=folder,
        instruction=instruction,
        agent=_stage(folder, {}, DEFAULT_WORKDIR),
        verifier=None,
        tests=folder / "tests",
        test_command=("bash", "/tests/run-tests.sh"),
        agent_seconds=_seconds(folder, config.get("max_agent_timeout_sec", 360.0), "max_agent_timeout_sec"),
        verifier_seconds=_seconds(folder, config.get("max_test_timeout_sec", 60.0), "max_test_timeout_sec"),
        verifier_env={"TEST_DIR": "/tests"},
        solution=folder if (folder / "solution.sh").is_file() else None,
        solve_command=("bash", "/solution/solution.sh"),
        is_scored_by_pytest=True,
    )


def _artifacts(folder: Path, given: Sequence[str | Mapping[str, str]]) -> tuple[str, ...]:
    paths = [one if isinstance(one, str) else one["source"] for one in given]
    if relative := [path for path in paths if not path.startswith("/")]:
        raise _bad(folder, f"has artifacts {relative}; absolute paths are expected.")
    return tuple(map(posixpath.normpath, paths))


def _text(folder: Path, name: str) -> str:
    path = folder / name
    try:
        text = path.read_text() if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise _bad(folder, f"has a file {name} that is not UTF-8: {error}") from None
    if not text.strip():
        raise _bad(folder, f"has no {name}, or an empty one.")
    return text


def _seconds(folder: Path, value: object, name: str) -> float:
    try:
        seconds = finite_number(value, name)
    except (TypeError, ValueError) as error:
        raise BadTask(f"the task {str(folder)!r}: {error}") from None
    if seconds <= 0:
        raise _bad(folder, f"has {name} {seconds:g}; a positive number of seconds is expected.")
    return seconds


def _variables(folder: Path, given: Mapping[str, object]) -> dict[str, str]:
    """Return variables, with `${NAME}` and `${NAME:-default}` replaced from this process's environment."""

    def of_machine(found: re.Match[str]) -> str:
        value = os.environ.get(found[1], found[2])
        if value is None:
            raise _bad(folder, f"needs the environment variable {found[1]}, which is not set.")
        return value

    return {name: _VARIABLE.sub(of_machine, str(value)) for name, value in given.items()}


def _stage(place: Path, config: Mapping[str, Any], default_workdir: str) -> Stage:
    """Return the stage of a folder, which may have a Dockerfile."""
    variables = _variables(place, config.get("env", {}))
    workdir = config.get("workdir") or default_workdir
    dockerfile = place / "Dockerfile"
    if image := config.get("docker_image"):
        return Stage(image, workdir, env=variables, why_image=f"it names the image {image!r}")
    if not dockerfile.is_file():
        copies = ((place, workdir),) if place.is_dir() and place.name == "environment" else ()
        return Stage(None, workdir, copies, variables)
    return _of_dockerfile(dockerfile, variables, config.get("workdir"))


def _of_dockerfile(dockerfile: Path, given: Mapping[str, str], given_workdir: str | None) -> Stage:
    """Return the stage of a Dockerfile.

    It needs an image unless the Dockerfile only has a plain base image, a working folder, copies and variables.
    """
    place = dockerfile.parent
    lines = re.sub(r"\\\n", " ", dockerfile.read_text()).splitlines()
    workdir = "/"
    variables: dict[str, str] = {}
    copies: list[tuple[Path, str]] = []
    why = ""
    for line in filter(None, map(str.strip, lines)):
        word, _, rest = line.partition(" ")
        parts = rest.split()
        match word.upper():
            case _ if line.startswith("#") or word.upper() in _IGNORED:
                pass
            case "FROM" if _PLAIN_IMAGE.fullmatch(rest.strip()):
                pass
            case "WORKDIR" if len(parts) == 1:
                workdir = posixpath.join(workdir, parts[0])
            case "ENV" if parts and all("=" in part for part in parts):
                variables |= dict(part.replace('"', "").split("=", 1) for part in parts)
            case "COPY" if len(parts) == 2 and not rest.startswith("--") and (place / parts[0]).exists():
                target = posixpath.normpath(posixpath.join(workdir, parts[1]))
                if parts[1].endswith("/") or posixpath.basename(parts[1]) in (".", ".."):  # into this folder
                    target += "/"
                copies.append((place / parts[0], target))
            case _:
                why = why or f"its Dockerfile has {line[:60]!r}"
    if workdir == "/":
        why = why or "its Dockerfile has no WORKDIR"
    return Stage(place, given_workdir or workdir, tuple(copies), {**variables, **given}, why)
