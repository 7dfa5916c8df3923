"""Where an engine's processes put sockets and files, so that nothing of them stays when they are killed."""

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
"""Tells vLLM's processes the folder, while an engine starts."""
_PREFIX = "llmrl-e-"
"""Short, since the path of a socket has 107 characters at most."""
_LOCK_NAME = "in-use"
_LOCK_SECONDS = 60.0
"""After which a new folder has its lock for sure."""


@contextlib.contextmanager
def engine_folder() -> Iterator[str]:
    """Give a folder that is removed with all that is in it, and remove those of trainers that were killed.

    A trainer locks the folders of its engines, and the kernel frees the locks of a process that ends.

    Example:
        >>> with engine_folder() as folder:
        ...     os.path.isdir(folder)
        True
        >>> os.path.isdir(folder)
        False
    """
    base = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed by another trainer at this moment
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
