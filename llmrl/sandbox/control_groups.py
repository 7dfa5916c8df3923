"""Control groups: a bound on the memory of an interpreter with all that it starts and writes. Standard library only.

See the kernel's `admin-guide/cgroup-v2.rst`, "Delegation", and for version 1 `cgroup-v1/memory.rst`.
"""

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
"""Name of the group that this program moves to: a group of version 2 that is divided has no processes of its own."""
_PREFIX = "llmrl-python-"
_numbers = itertools.count()


class MemoryGroups:
    """A control group for each interpreter, below the group of this program.

    That has to be delegated to it. A group of version 2 is where its manager has divided it or says so, as `systemd-run
    --scope -p Delegate=yes` does, one of version 1 where this program's user may write to it.

    Args:
        num_bytes: bytes of memory, in each.

    Raises:
        OSError: if no group is delegated.
    """

    def __init__(self, num_bytes: int) -> None:
        own, version = delegated_group()
        for left in own.glob(f"{_PREFIX}*"):  # of programs that were killed
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
            # Rules of who may join which group differ between kernels: try.
            subprocess.run(
                ["/bin/sh", "-c", 'echo 0 >"$0"', str(self.add(lambda: False))], check=True, stderr=subprocess.DEVNULL
            )
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            raise OSError(errno.EACCES, f"processes cannot join a group below {own}: {error}") from None

    def add(self, is_used: Callable[[], bool]) -> Path:
        """Make a group: the file that a process joins it by, by writing 0 to it.

        Groups that are used no more are removed, once their processes have ended.
        """
        for left in [group for group, is_still_used in self._is_used.items() if not is_still_used()]:
            with contextlib.suppress(OSError):  # some process lives in it
                left.rmdir()
                del self._is_used[left]
        group = self._folder / str(next(_numbers))
        self._is_used[group] = is_used
        group.mkdir()
        for name, num_bytes in self._limits.items():
            if (group / name).exists():  # without swap there is no limit of it
                (group / name).write_text(str(num_bytes))
        return group / "cgroup.procs"

    def close(self) -> None:
        """Remove the groups; waits for their processes, which are ending."""
        for _ in range(500):
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
    """Return the control group that this program may divide, and the version of its interface.

    Raises:
        OSError: if there is none.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and _CONTROLLER not in controllers.split(","):
            continue
        own = _mounted(path, version)
        if own is not None and os.access(own, os.W_OK) and (version == 1 or (own := _divided(own)) is not None):
            return own, version
    raise OSError(errno.ENOENT, "no control group with a bound on memory is delegated to this program")


def _mounted(path: str, version: int) -> Path | None:
    """Return where a group is in the file system."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        first, _, second = line.partition(" - ")
        (kind, _, options), (root, folder) = second.split()[:3], first.split()[3:5]
        if kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or _CONTROLLER in options.split(",")):
            inner = os.path.relpath(path, root)
            return None if inner.startswith("..") else Path(folder, inner)
    return None


def _divided(group: Path) -> Path | None:
    """A control group of version 2 with bounded subgroups; its processes move to one if its manager allows it."""
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
