"""Starts confined interpreters at the levels of isolation that this machine allows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import llmrl
from llmrl._utils.arguments import check_positive
from llmrl.sandbox import kernel
from llmrl.sandbox.control_groups import MemoryGroups
from llmrl.sandbox.supervisor import remove_folder
from llmrl.sandbox.zygote import Settings, is_python_hidden

Isolation = Literal["auto", "namespaces", "bubblewrap", "process"]
LEVELS: tuple[Isolation, ...] = ("namespaces", "bubblewrap", "process")
"""In order of preference; the last one is always available."""

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32")
_SETTINGS = (
    "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/etc/nsswitch.conf", "/etc/passwd", "/etc/group",
)  # fmt: skip
_CODE = "import sys; sys.path.insert(0, {root!r}); from llmrl.sandbox.zygote import main; sys.path.pop(0); main()"
# Joins the control group and is killed first, as `zygote._start` and `kernel.be_killed_first` do.
_PREPARE = 'echo 0 >"$0" || exit 1; echo 1000 2>/dev/null >/proc/self/oom_score_adj; exec "$@"'
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Many interpreters share this machine, and threads count as processes.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # Git fails if it cannot read the machine's settings.
    "GIT_CONFIG_NOSYSTEM": "1",
}


class IsolationError(RuntimeError):
    """This machine does not allow the required level of isolation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLimits:
    """Limits for code, enforced by the kernel. Raises ValueError if a limit is not positive."""

    memory_bytes: int = 1 << 30
    """Address space per process. If control groups are delegated to this program, all processes and files of an
    interpreter also share a limit of `memory_bytes` + `folder_bytes`."""
    cpu_seconds: float = 30.0
    """CPU time per call, of the interpreter's own process."""
    num_processes: int = 32
    """Concurrent processes and threads."""
    num_open_files: int = 256
    """Open files per process."""
    file_bytes: int = 64 << 20
    """Size of one file."""
    folder_bytes: int = 64 << 20
    """Total size of files, if the working folder is in memory (`namespaces`, `bubblewrap`)."""
    output_bytes: int = 256 << 10
    """Bytes kept of standard output and of standard error: the first and last halves."""

    def __post_init__(self) -> None:
        check_positive(**asdict(self))


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the paths that are below none of the others, nor below the system's folders.

    Example:
        >>> outermost(["/srv/python", "/srv/python/lib", "/usr/lib/python3", "/srv/other"])
        ['/srv/other', '/srv/python']
    """
    kept: list[str] = []
    for path in sorted(set(paths), key=len):
        if not kernel.is_below(path, [*_SYSTEM, *kept]):
            kept.append(path)
    return sorted(kept)


class Launcher:
    """Starts interpreters at one level of isolation.

    Raises:
        IsolationError: if this machine does not allow the level.
        ValueError: if a link is a folder of the system or of Python.
    """

    def __init__(self, level: Isolation, limits: PythonLimits, links: Sequence[str] = ()) -> None:
        self.level = level
        self.limits = limits
        self.folder = tempfile.mkdtemp(prefix="llmrl-python-")
        self._finalizer = weakref.finalize(self, remove_folder, self.folder)
        # Interpreters that run as other users need access to their folders in this one.
        os.chmod(self.folder, 0o711)  # noqa: PTH101
        prefixes = outermost({sys.prefix, sys.base_prefix, sys.exec_prefix, *site.getsitepackages()})
        readable = [*_SYSTEM, *_SETTINGS, *prefixes]
        self._settings: Settings = {
            "level": level,
            "folder": self.folder,
            "readable": readable,
            "links": [*links],
            "is_python_hidden": is_python_hidden(prefixes),
            "limits": asdict(limits),
        }
        if taken := [link for link in links if any(kernel.is_below(path, [link]) for path in readable)]:
            raise ValueError(f"links must not be folders of the system or of Python, got {taken}.")
        self._groups: MemoryGroups | None = None
        self._num_started = 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._control: socket.socket | None = None
        self._bubblewrap = shutil.which("bwrap")
        if links and level == "process":
            raise IsolationError(f"commands share the machine's file system, so the links {[*links]} cannot be made.")
        if level == "bubblewrap" and self._bubblewrap is None:
            raise IsolationError("the program bwrap (package bubblewrap) is not installed.")
        is_hidden = self._settings["is_python_hidden"] and not os.getuid() and not kernel.landlock_version()
        if level == "process" and is_hidden:
            raise IsolationError(
                f"code would run as an unprivileged user, who cannot read Python's files below {prefixes}; "
                "install Python where every user can read it."
            )
        with contextlib.suppress(OSError):
            self._groups = MemoryGroups(limits.memory_bytes + limits.folder_bytes)
        if level != "bubblewrap":
            try:
                self._start_zygote()
            except IsolationError:
                self.close()  # removes the control group
                raise

    def describe(self) -> str:
        """Describe the isolation in one sentence."""
        bound = "" if self._groups is None else ", a bound on memory in all"
        if self.level != "process":
            return f"{self.level}: no network, no files but Python's and the system's (read-only), own processes{bound}"
        user = "the user that runs this program" if os.getuid() else "its own user"
        confined = {
            "files": "writes only in its folder, reads only Python and the system",
            "signals": "no signals to others",
        }
        parts = [f"{name} NOT confined" if name in self.gaps else said for name, said in confined.items()]
        return f"process: resource limits, no sockets, {user}, {', '.join(parts)}{bound}"

    @property
    def gaps(self) -> list[str]:
        """Resources that this level does not confine on this machine: any of `files`, `signals`."""
        if self.level != "process":
            return []
        version = kernel.landlock_version()
        gaps = []
        if version == 0:
            gaps.append("files")
        if version < kernel.LANDLOCK_OF_SIGNALS and os.getuid():
            gaps.append("signals")
        return gaps

    def start(self) -> socket.socket:
        """Start an interpreter, and return the socket to it. Raises IsolationError if that fails."""
        ours, theirs = socket.socketpair()
        group = os.devnull
        if self._groups is not None:
            group = str(self._groups.add(lambda: ours.fileno() >= 0))
        with theirs:
            if self.level == "bubblewrap":
                self._start_bubblewrap(theirs, group)
            else:
                self._ask_zygote(theirs, group)
        return ours

    def _ask_zygote(self, theirs: socket.socket, group: str) -> None:
        for _ in range(2):
            try:
                assert self._control is not None
                with Path(group).open("wb") as joins:
                    socket.send_fds(self._control, [b"start"], [theirs.fileno(), joins.fileno()])
                return
            except OSError:
                self._start_zygote()  # the zygote was killed
        raise IsolationError("interpreters cannot be started: the process that forks them ended twice.")

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._spawn([sys.executable], theirs, self._settings)
        ours.settimeout(30)
        error = "its process ended"
        try:
            if greeting := ours.recv(4096):
                error = json.loads(greeting).get("error")
        except OSError as failure:
            error = str(failure)
        if error:
            ours.close()
            raise IsolationError(f"{self.level} is not available here: {error}.")
        if self._control is not None:
            self._control.close()
        self._control = ours

    def _start_bubblewrap(self, theirs: socket.socket, group: str) -> None:
        self._num_started += 1
        package = str(Path(llmrl.__file__).parent)
        command = [str(self._bubblewrap), "--die-with-parent", "--new-session", "--as-pid-1"]
        command += ["--dev", "/dev", "--proc", "/proc"]
        if os.getuid():
            command += ["--unshare-all"]
        else:  # without a user namespace, so that each interpreter can have its own user
            command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
            for name in ("SETUID", "SETGID", "SETPCAP", "CHOWN", "KILL", "SYS_RESOURCE"):
                command += ["--cap-add", f"CAP_{name}"]
        readable = self._settings["readable"]
        own = [path for path in (f"{package}/sandbox", f"{package}/__init__.py") if not kernel.is_below(path, readable)]
        for path in [*readable, *own]:
            for parent in reversed(Path(path).parents[:-1]):
                command += ["--perms", "0755", "--dir", str(parent)]
            if Path(path).is_symlink():
                command += ["--symlink", str(Path(path).readlink()), path]
            else:
                command += ["--ro-bind-try", path, path]
        command += ["--size", str(self.limits.folder_bytes), "--perms", "0700", "--tmpfs", kernel.BOX]
        for link in self._settings["links"]:
            command += ["--symlink", kernel.BOX + link, link]
        if not any(path.startswith("/tmp/") for path in command):
            command += ["--symlink", kernel.BOX, "/tmp"]
        for path in ("/", "/dev", "/proc"):  # `/dev` has a writable folder in memory
            command += ["--remount-ro", path]
        command = ["/bin/sh", "-c", _PREPARE, group, *command]
        index = os.getpid() * 100 + self._num_started % 100
        self._spawn([*command, sys.executable], theirs, {**self._settings, "index": index})

    def _spawn(self, command: list[str], theirs: socket.socket, settings: Settings) -> None:
        code = _CODE.format(root=str(Path(llmrl.__file__).parent.parent))
        settings = {**settings, "control": theirs.fileno()}
        self._processes = [process for process in self._processes if process.poll() is None]
        self._processes.append(
            subprocess.Popen(
                [*command, "-I", "-c", code, json.dumps(settings)],
                env=_ENVIRONMENT,
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        )

    def close(self) -> None:
        """Stop the processes that start interpreters; interpreters end with their sockets."""
        if self._control is not None:
            self._control.close()
            self._control = None
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._groups is not None:
            self._groups.close()
        self._finalizer()
