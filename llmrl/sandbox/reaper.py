"""Runs a program, and kills its descendants at its end or on request. Standard library only."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

from llmrl.sandbox import kernel
from llmrl.sandbox.supervisor import descendants, is_zombie

_KILL_SECONDS = 5.0
_MAX_REAPED = 1000


def reaping(words: list[str], *, end: int, term_seconds: float) -> list[str]:
    """Return the command line of a process that runs the program `words` and exits with its status.

    On Linux, descendants that leave the program's session are ended, too.

    Args:
        end: descriptor of a pipe; the program and its descendants are ended once it is readable.
        term_seconds: time between SIGTERM and SIGKILL.
    """
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from llmrl.sandbox.reaper import main; main()"
    return [sys.executable, "-I", "-S", "-c", code, str(end), str(term_seconds), *words]


def main() -> None:
    """Run the program of a command line from `reaping`. The function does not return."""
    end, term_seconds, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(end, False)
    with contextlib.suppress(OSError, AttributeError):  # Linux only
        kernel.become_reaper()
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    program = _start(words)
    poller = select.poll()
    for descriptor in (end, woken):
        poller.register(descriptor, select.POLLIN)
    status = _reap(program)
    while status is None and end not in (ready := [descriptor for descriptor, _ in poller.poll()]):
        if woken in ready:
            os.read(woken, 1 << 10)
        status = _reap(program)
    status = _end_all(program, status, term_seconds)
    _exit_as(signal.SIGKILL if status is None else status)


def _start(words: list[str]) -> int:
    program = os.fork()
    if program:
        return program
    try:
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):  # Python ignores the first two
            signal.signal(number, signal.SIG_DFL)
        os.execvp(words[0], words)
    except OSError as error:
        os.write(2, f"{words[0]} cannot be started: {error.strerror}\n".encode(errors="replace"))
    finally:
        os._exit(127)


def _reap(program: int, status: int | None = None) -> int | None:
    """Reap the children that have ended, and return the program's status, if it is known now."""
    with contextlib.suppress(ChildProcessError):
        for _ in range(_MAX_REAPED):
            process, its_status = os.waitpid(-1, os.WNOHANG)
            if not process:
                break
            if process == program and status is None:
                status = its_status
    return status


def _end_all(program: int, status: int | None, term_seconds: float) -> int | None:
    """End all descendants, by SIGTERM, then SIGKILL; return the program's status, if it is known now."""
    asked: set[int] = set()
    for number, seconds in ((signal.SIGTERM, term_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        with contextlib.suppress(OSError):
            os.killpg(program, number)
        while time.monotonic() < deadline:
            left = sorted((process for process in descendants(os.getpid()) if not is_zombie(process)), reverse=True)
            for process in left:
                if number == signal.SIGKILL or process not in asked:
                    with contextlib.suppress(OSError):
                        os.kill(process, number)
            asked.update(left)
            status = _reap(program, status)
            if not left:
                return status
            time.sleep(0.005)
    return status


def _exit_as(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if -code != signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        os._exit(128 - code)
    os._exit(code)
