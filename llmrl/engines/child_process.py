"""Engine processes that end with their parent and ignore the terminal's Ctrl-C."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys

from llmrl._utils.garbage import NUM_OBJECTS
from llmrl.engines.engine_folder import FOLDER_VARIABLE
from llmrl.engines.vllm.private import put_files_into

PARENT_VARIABLE = "LLMRL_ENGINE_PARENT"
"""Environment variable with the parent's process id, set while an engine starts."""

_PR_SET_PDEATHSIG = 1
_PYTHONS_THRESHOLDS = (700, 10, 10)


def _prepare_imports() -> None:
    """Set the log level in an engine's process before vLLM is imported, because vLLM sets it after its imports.

    Garbage is collected rarely until `register`: with Python's threshold it takes a quarter of the imports' time.
    """
    if os.environ.get(PARENT_VARIABLE, str(os.getpid())) == str(os.getpid()):
        return
    if __name__ == "__mp_main__":  # other programs that start meanwhile keep theirs
        gc.set_threshold(NUM_OBJECTS)
    if (level := os.environ.get("VLLM_LOGGING_LEVEL")) is not None:
        logging.getLogger("vllm").setLevel(level)


# Engine processes are spawned and import this module as their main module (`starting_environment`) before vLLM.
_prepare_imports()


def register() -> None:
    """Prepare a vLLM process; called in each vLLM process, and without effect except in those of an `AsyncVLLM`.

    The kernel kills the process if its parent dies (Linux). The process leaves the terminal's
    foreground group, so that Ctrl-C reaches only the parent, which can still evaluate and save.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None or int(parent) == os.getpid():
        return
    if sys.platform == "linux" and int(parent) == os.getppid():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if int(parent) != os.getppid():
        if not is_running(int(parent)):  # the parent died before prctl took effect
            os.kill(os.getpid(), signal.SIGKILL)
        return  # the variable belongs to another process that starts at the same time
    gc.set_threshold(*_PYTHONS_THRESHOLDS)
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # for the workers that this process starts
    if FOLDER_VARIABLE in os.environ:
        put_files_into(os.environ[FOLDER_VARIABLE])
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    atexit.register(_end_quickly)


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    import psutil

    try:
        return psutil.Process(process).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _end_quickly() -> None:
    """Skip the garbage collection at exit, which takes seconds while the parent waits."""
    gc.freeze()
    # nanobind would print pages of warnings about leaks.
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
