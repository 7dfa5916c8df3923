"""`python_with`: cached virtual environments for packages of other projects."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet

_DONE = "installed"
_MAX_OUTPUT = 2000
_BUILT = ("__pycache__", "build", "dist")


class InstallError(ValueError):
    """Packages could not be installed."""


def cache_folder() -> Path:
    """Return the folder of the virtual environments, below `XDG_CACHE_HOME` or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "llmrl", "environments")


def python_with(requirements: Sequence[str], *, version: str = "") -> Path:
    """Return the Python of a virtual environment with these packages, which the first call creates.

    The environment is created with uv if installed, otherwise with `venv` and pip. Folders among the requirements are
    copied first, because a build writes into its folder; if their files change, a new environment is created.

    Args:
        requirements: lines of a `requirements.txt`: packages, folders, wheels, options such as `--index-url URL`.
        version: required versions of Python, such as `>=3.12`; by default this Python. Only uv can use another Python.

    Raises:
        InstallError: if the packages cannot be installed, with the end of the installer's output.
    """
    folder = cache_folder() / _digest(requirements, version)
    python = folder / "bin" / "python"
    if (folder / _DONE).exists():
        return python
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if not (folder / _DONE).exists():  # another process may have made it meanwhile
            shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted installation
            _make(folder, python, requirements, version)
            (folder / _DONE).touch()
    return python


def _make(folder: Path, python: Path, requirements: Sequence[str], version: str) -> None:
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        _run([sys.executable, "-m", "venv", str(folder)])
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-input"]
    else:
        interpreter = version
        if not version or platform.python_version() in SpecifierSet(version):
            interpreter = sys.executable
        _run([uv, "venv", "--quiet", "--python", interpreter, str(folder)])
        install = [uv, "pip", "install", "--quiet", "--python", str(python)]
    lines = []
    for number, line in enumerate(requirements):
        if _is_path(line) and (path := Path(line).expanduser().resolve()).is_dir():
            line = str(shutil.copytree(path, folder / "sources" / str(number), ignore=_ignored, symlinks=True))
        lines.append(line)
    listed = folder / "requirements.txt"
    listed.write_text("".join(f"{line}\n" for line in lines))
    _run([*install, "-r", str(listed)])


def _ignored(folder: object, names: Iterable[str]) -> list[str]:
    """Return the names of a folder's entries that are not part of its source."""
    return [name for name in names if name.startswith(".") or name in _BUILT or name.endswith(".egg-info")]


def _is_path(line: str) -> bool:
    return line[:1] in ("/", ".", "~") and Path(line).expanduser().exists()


def _run(words: list[str]) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables)
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-_MAX_OUTPUT:]
        raise InstallError(f"{' '.join(words[:4])} … failed with exit code {done.returncode}:\n{output}")


def _digest(requirements: Iterable[str], version: str) -> str:
    """Return a hash of Python's version, the requirements, and the files of local folders and wheels."""
    content = hashlib.blake2b(f"{sys.version_info[:2]}{version}".encode(), digest_size=10)
    for line in requirements:
        content.update(f"\n{line}\n".encode())
        if _is_path(line):
            path = Path(line).expanduser()
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                relative = file.relative_to(path)
                if file.is_file() and not _ignored(path, relative.parts):
                    content.update(f"{relative}\n".encode() + file.read_bytes())
    return content.hexdigest()
