"""`FolderLock`: lets one process at a time write into a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

from llmrl._utils.files import UnsafeFileError, open_file


class FolderInUseError(RuntimeError):
    """The folder is locked by another process, or by another object of this process."""


class FolderLock:
    """An exclusive lock on the file `lock` of a folder, held until `release` or the end of the process.

    Warns if the file system does not support locks. Raises FolderInUseError if another holder has
    the lock; the message names its process and host.
    """

    def __init__(self, folder: Path) -> None:
        with open_file(folder / "lock", "a+b") as file:
            descriptor = os.dup(file.fileno())
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 300, 0).decode(errors="replace").strip()
            self.release()
            raise FolderInUseError(
                f"{folder} is in use by {holder or 'another process'}: two runs in one folder would write everything "
                "twice. Wait for that process, end it (in this process: close the Run or RunFolder), or name another "
                "folder."
            ) from None
        except OSError as error:
            warnings.warn(f"{folder} cannot be locked ({error}): make sure that no other run uses it.", stacklevel=3)
            return
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        self._release()


def is_in_use(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder."""
    try:
        with open_file(folder / "lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, UnsafeFileError):  # no lock file, or a file system without locks
        pass
    return False


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    # A forked child inherits the open file and would hold the lock as long as it lives.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_leave_to_parent)
