"""Engine processes that end with their parent and ignore the terminal's Ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import signal
import sys
from pathlib import Path

from llmrl.engines.engine_folder import FOLDER_VARIABLE
from llmrl.engines.vllm.private import put_files_into

PARENT_VARIABLE = "LLMRL_ENGINE_PARENT"
"""Set while an engine starts: the process id of its parent."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Prepare one of vLLM's processes, each of which calls this; only those of an `AsyncVLLM` are changed.

    A parent that is killed cannot end its engine, so the kernel is asked to (Linux). It is asked long after the process
    was started, when vLLM is imported: a process ends if its parent is gone by then. Ctrl-C reaches every process
    of the terminal's foreground group; the parent decides what it means for the engine, so that an interrupted script
    can still evaluate and save.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or int(parent) == os.getpid():
        return
    if sys.platform == "linux" and int(parent) == os.getppid():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(parent) != os.getppid():
        if not is_running(int(parent)):  # it died while this process started, perhaps before the request was in force
            os.kill(os.getpid(), signal.SIGKILL)
        return  # another process's, which was started at the same time
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # of the workers that this process starts
    if FOLDER_VARIABLE in os.environ:
        put_files_into(os.environ[FOLDER_VARIABLE])
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    atexit.register(_end_quickly)


def is_running(process: int) -> bool:
    """Return whether there is such a process and it has not ended; a zombie has.

    Example:
        >>> is_running(os.getpid())
        True
    """
    try:
        state = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        if sys.platform == "linux":
            return False
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    return state not in ("Z", "X")


def _end_quickly() -> None:
    """Spare the ending interpreter its search of all objects for garbage: for seconds, while the parent waits."""
    gc.freeze()
    # nanobind takes what is then left for leaks, and pages of them would be the last that the parent's user reads.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
