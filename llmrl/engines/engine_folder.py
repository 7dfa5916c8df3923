"""Folder for the sockets and files of an engine's processes, removed even if they are killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "VLLM_RPC_BASE_PATH"
"""Environment variable that names the folder for vLLM's processes."""
_PREFIX = "llmrl-e-"
"""Short, because a socket's path has at most 107 characters."""
_LOCK_NAME = "in-use"
_LOCK_SECONDS = 60.0
"""Age from which a folder without a lock counts as abandoned."""


@contextlib.contextmanager
def engine_folder() -> Iterator[str]:
    """Create and lock a temporary folder, and remove those of killed trainers, which the kernel has unlocked.

    Example:
        >>> with engine_folder() as folder:
        ...     os.path.isdir(folder)
        True
        >>> os.path.isdir(folder)
        False
    """
    base = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or another trainer removes it
            _remove_if_left(left)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base, ignore_cleanup_errors=True) as folder,
        Path(folder, _LOCK_NAME).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _remove_if_left(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime < _LOCK_SECONDS:
        return
    with (folder / _LOCK_NAME).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
