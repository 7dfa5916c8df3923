"""A limit on the CPU time of user code, in any thread."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

Result = TypeVar("Result")

_LOOK_SECONDS = 0.1
_REPEAT_SECONDS = 1.0  # Python drops an exception that is raised in a finalizer, so it is raised again later


class CpuLimitError(Exception):
    """User code exceeded its limit of CPU time."""


class _Expired(BaseException):
    """Raised inside user code to stop it; a BaseException, so that `except Exception` does not catch it."""


@dataclass(slots=True, eq=False)
class _Call:
    seconds: Callable[[], float]
    """Function that returns the CPU time of the thread, or the wall time if CPU time is unavailable (macOS)."""
    end_s: float
    is_expired: bool = False


_calls: dict[int, _Call] = {}  # by thread identifier
_lock = threading.Lock()
_is_called = threading.Event()
_watches: list[threading.Thread] = []


def call_within(function: Callable[[], Result], cpu_seconds: float) -> Result:
    """Call a function, and stop it after `cpu_seconds` of this thread's CPU time.

    Raises CpuLimitError if the function is stopped. It is stopped between two Python instructions,
    so a call into an extension module finishes first. Calls cannot be nested.
    """
    thread = threading.get_ident()
    seconds: Callable[[], float] = time.monotonic
    if hasattr(time, "pthread_getcpuclockid"):
        seconds = partial(time.clock_gettime, time.pthread_getcpuclockid(thread))
    call = _Call(seconds, seconds() + cpu_seconds)
    try:
        try:
            _begin(thread, call)
            return function()
        finally:
            with _lock:
                _calls.pop(thread, None)
            if call.is_expired:  # the exception may still be pending
                _set_exception(thread, None)
    except _Expired:
        with _lock:
            _calls.pop(thread, None)
        raise CpuLimitError(f"it computed for more than {cpu_seconds:g} s") from None


def _begin(thread: int, call: _Call) -> None:
    with _lock:
        if not _watches or not _watches[0].is_alive():  # a forked process has no other threads
            _calls.clear()
            _watches[:] = [threading.Thread(target=_watch, name="llmrl-cpu-limit", daemon=True)]
            _watches[0].start()
        _calls[thread] = call
    if not _is_called.is_set():
        _is_called.set()


def _watch() -> None:
    while True:
        _is_called.wait()
        time.sleep(_LOOK_SECONDS)  # so that many short calls wake this thread once
        _is_called.clear()
        with _lock:
            for thread, call in _calls.items():
                if call.seconds() > call.end_s:
                    call.is_expired = True
                    call.end_s += _REPEAT_SECONDS
                    _set_exception(thread, _Expired)
            if _calls:
                _is_called.set()


def _set_exception(thread: int, kind: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind and ctypes.py_object(kind))
