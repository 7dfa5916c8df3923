"""Forks supervisors from a process that has only loaded Python. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, TypedDict

from llmrl.sandbox import frames, inside, kernel  # noqa: F401  loads `inside` for confined code
from llmrl.sandbox.supervisor import Confinement, Supervisor

# User ids without an account: one per running interpreter, derived from its process id.
_FIRST_USER = 1_700_000_000


class Settings(TypedDict, total=False):
    """Settings from the launcher, as JSON."""

    level: str
    folder: str
    """Folder of the interpreters' folders."""
    readable: list[str]
    """Paths that code may read."""
    links: list[str]
    """Paths that link into the interpreter's folder."""
    is_python_hidden: bool
    limits: dict[str, Any]
    """Fields of `PythonLimits`."""
    control: int
    """Descriptor of the socket to serve."""
    index: int
    """Number of the interpreter, if each is started separately."""


def main() -> None:
    """Serve the socket of the settings, which are a JSON object in the program's first argument."""
    settings: Settings = json.loads(sys.argv[1])
    control = socket.socket(fileno=settings["control"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    is_root = os.getuid() == 0
    if settings["level"] == "bubblewrap":
        folder, user = _settle(settings, is_root=is_root)
        _supervise(settings, control, folder, user)
        return
    try:
        if settings["level"] == "namespaces":
            _enter_namespaces(settings, is_root=is_root)
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    control.send(b"{}")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # do not wait for supervisors
    while True:
        message, received, _, _ = socket.recv_fds(control, 64, 2)
        if not message:
            return
        if not os.fork():
            control.close()
            _start(settings, socket.socket(fileno=received[0]), received[1], is_root=is_root)
        for descriptor in received:
            os.close(descriptor)


def _enter_namespaces(settings: Settings, *, is_root: bool) -> None:
    shared = kernel.NEW_MOUNTS | kernel.NEW_NETWORK | kernel.NEW_IPC | kernel.NEW_HOST_NAME
    _unshare(shared, is_root=is_root)
    kernel.change_root(settings["folder"], settings["readable"], settings["links"])


def _unshare(flags: int, *, is_root: bool) -> None:
    """Enter new namespaces, without root as the root of a new user namespace."""
    if is_root:
        kernel.unshare(flags)
        return
    user = os.getuid()
    group = os.getgid()
    kernel.unshare(flags | kernel.NEW_USER)
    kernel.map_to_root(user, group)


def _start(settings: Settings, service: socket.socket, joining: int, *, is_root: bool) -> None:
    """Join a control group by its descriptor, and become a supervisor, in a fork. Does not return."""
    try:
        try:
            os.write(joining, b"0")
            os.close(joining)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            folder, user = _settle(settings, is_root=is_root)
        except OSError as error:
            said = f"{error}; root needs CAP_CHOWN, CAP_SETUID and CAP_SETGID" if is_root else str(error)
            service.sendall(frames.encode({"why": said}))
            return
        _supervise(settings, service, folder, user)
    finally:
        os._exit(0)


def _settle(settings: Settings, *, is_root: bool) -> tuple[str, int | None]:
    """Enter the namespaces, and return the interpreter's folder and, if this is root, its user."""
    if settings["level"] == "namespaces":
        _unshare(kernel.NEW_PIDS | kernel.NEW_MOUNTS, is_root=is_root)  # an IPC namespace each would take 30 ms
        if os.fork():
            os._exit(0)  # the child is the first process of the new namespace
        user = _FIRST_USER + int(str(Path("/proc/self").readlink())) if is_root else None
        kernel.be_killed_first()
        kernel.mount_own_proc()
        kernel.mount_private_tmp(kernel.BOX, settings["limits"]["folder_bytes"], user or 0)
        return kernel.BOX, user
    kernel.become_reaper()
    if settings["level"] == "bubblewrap":
        folder = kernel.BOX
        own_user = _FIRST_USER + settings["index"]
    else:
        os.setsid()
        folder = tempfile.mkdtemp(dir=settings["folder"])
        own_user = _FIRST_USER + os.getpid()
    if not is_root:
        return folder, None
    os.chown(folder, own_user, own_user)
    return folder, own_user


def _supervise(settings: Settings, service: socket.socket, folder: str, user: int | None) -> None:
    level = settings["level"]
    limits = settings["limits"]
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None
    confinement = Confinement(
        folder=folder,
        readable=tuple(settings["readable"]),
        user=user,
        has_own_processes=level != "process",
        is_landlocked=level == "process" and kernel.landlock_version() > 0,
        is_python_hidden=settings["is_python_hidden"],
        **{key: value for key, value in limits.items() if key != "folder_bytes"},
    )
    Supervisor(service, confinement).serve()


def is_python_hidden(prefixes: list[str]) -> bool:
    """Return whether only root can read Python's own files."""
    folders = {folder for prefix in prefixes for folder in (Path(prefix), *Path(prefix).parents)}
    return any(not folder.stat().st_mode & 0o001 for folder in folders if folder.exists())
