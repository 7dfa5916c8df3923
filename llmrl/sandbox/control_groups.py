"""Memory limits through control groups (kernel: `admin-guide/cgroup-v2.rst`). Standard library only."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_CONTROLLER = "memory"
_PROGRAM = "llmrl-program"
"""Group for this program's processes: in version 2, a group with subgroups may have none itself."""
_PREFIX = "llmrl-python-"
_numbers = itertools.count()


class MemoryGroups:
    """One control group for each interpreter, below this program's, which must be delegated to it.

    A group of version 1 is delegated if this user may write to it. In version 2, its manager must
    also have enabled subgroups or marked it as delegated (`systemd-run --scope -p Delegate=yes`).

    Raises OSError if no group is delegated, or if processes cannot join its subgroups.
    """

    def __init__(self, num_bytes: int) -> None:
        own, version = delegated_group()
        for left in own.glob(f"{_PREFIX}*"):  # left by programs that were killed
            if not Path("/proc", left.name.split("-")[-2]).exists():
                _remove(left)
        self._folder = own / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._limits = {"memory.max": num_bytes, "memory.swap.max": 0}
        if version == 1:
            self._limits = {"memory.limit_in_bytes": num_bytes, "memory.memsw.limit_in_bytes": num_bytes}
        self._is_used: dict[Path, Callable[[], bool]] = {}
        self._folder.mkdir()
        try:
            if version == 2:
                (self._folder / "cgroup.subtree_control").write_text(f"+{_CONTROLLER}")
            # The rules for joining groups differ between kernels, so try it.
            join = ["/bin/sh", "-c", 'echo 0 >"$0"', str(self.add(lambda: False))]
            subprocess.run(join, check=True, stderr=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise OSError(errno.EACCES, f"processes cannot join a group below {own}: {error}") from None

    def add(self, is_used: Callable[[], bool]) -> Path:
        """Remove unused groups, create one, and return the file to which a process writes 0 to join."""
        for left in [group for group, is_still_used in self._is_used.items() if not is_still_used()]:
            with contextlib.suppress(OSError):  # a process is still in it
                left.rmdir()
                del self._is_used[left]
        group = self._folder / str(next(_numbers))
        self._is_used[group] = is_used
        group.mkdir()
        for name, num_bytes in self._limits.items():
            if (group / name).exists():  # absent without swap
                (group / name).write_text(str(num_bytes))
        return group / "cgroup.procs"

    def close(self) -> None:
        """Remove the groups, waiting up to 30 s for their processes to end."""
        for _ in range(3000):
            _remove(self._folder)
            if not self._folder.exists():
                return
            time.sleep(0.01)


def _remove(group: Path) -> None:
    with contextlib.suppress(OSError):
        for below in group.iterdir():
            if below.is_dir():
                _remove(below)
        group.rmdir()


def delegated_group() -> tuple[Path, int]:
    """Return the group delegated to this program, and its version. Raises OSError if there is none."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and _CONTROLLER not in controllers.split(","):
            continue
        own = _mounted(path, version)
        if own is not None and os.access(own, os.W_OK) and (version == 1 or (own := _divided(own)) is not None):
            return own, version
    raise OSError(errno.ENOENT, "no control group with the memory controller is delegated to this program")


def _mounted(path: str, version: int) -> Path | None:
    """Return the path of a group in the file system, or None if the group is not mounted."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        (kind, _, options), (root, folder) = second.split()[:3], first.split()[3:5]
        if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or _CONTROLLER in options.split(",")):
            inner = os.path.relpath(path, root)
            return None if inner.startswith("..") else Path(folder, inner)
    return None


def _divided(group: Path) -> Path | None:
    """Return a version 2 group that may have limited subgroups, emptied of processes, or None."""
    if group.name == _PROGRAM:
        group = group.parent
    if _CONTROLLER in (group / "cgroup.subtree_control").read_text().split():
        return group
    is_delegated = False
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            is_delegated = is_delegated or os.getxattr(group, name) == b"1"
    if not is_delegated or _CONTROLLER not in (group / "cgroup.controllers").read_text().split():
        return None
    program = group / _PROGRAM
    program.mkdir(exist_ok=True)
    for process in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            (program / "cgroup.procs").write_text(process)
    (group / "cgroup.subtree_control").write_text(f"+{_CONTROLLER}")
    return group
