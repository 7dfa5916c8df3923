"""Interpreters at each level of isolation, as root and as an ordinary user: what attacks on them run in.

Run as root, the tests start a program of an ordinary user that serves its interpreters:
`python cages.py LEVEL LIMITS LANDLOCK`.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path

from llmrl.sandbox import launch
from llmrl.sandbox.control_groups import delegated_group
from llmrl.sandbox.launch import LEVELS, IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService

USERS = ("root", "ordinary")
# The kernel counts processes per user, so each worker has a user of its own: a fork bomb of one starves no other.
_USER_ID = 54321 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
LIMITS = PythonLimits(memory_bytes=512 << 20, file_bytes=1 << 20, num_processes=24, output_bytes=20_000)
SECRET = "hunter2"
# What code starts to be left behind goes by this name, which processes of another worker's tests do not have.
HOSTILE = f"hostile-{os.getpid()}-"
_TIMEOUT_S = 100.0


class Cage:
    """A service at a level, started by a user, and what its code must not reach.

    Args:
        user: one of `USERS`.
        level: one of `LEVELS`.
        landlock: version of Landlock that an ordinary user's interpreters take the kernel's for.

    Raises:
        IsolationError: where the machine does not allow it.
    """

    def __init__(self, user, level, landlock=None):
        self.user, self.level = user, level
        is_root = os.getuid() == 0
        self.uid = _USER_ID if is_root and user == "ordinary" else os.getuid()
        if user == "root" and not is_root:
            raise IsolationError("The tests do not run as root.")
        self.folder = Path(tempfile.mkdtemp(prefix="llmrl-outside-"))
        """A folder of the user that runs the service, with a secret in it."""
        (self.folder / "secret").write_text(SECRET)
        try:
            if user == "ordinary" and is_root:
                self.service = OtherUsersService(level, self.folder, landlock)
            else:
                os.environ["LLMRL_TEST_SECRET"] = SECRET
                self.service = PythonExecutorService(timeout=_TIMEOUT_S, isolation=level, limits=LIMITS, num_ready=2)
        except BaseException:
            shutil.rmtree(self.folder)
            raise

    def run(self, code, session="chat", **arguments):
        """Run code in a conversation."""
        return self.service.execute(code, session=session, **arguments)

    def lines(self, code):
        """What code prints, which must end well."""
        result = self.run(code)
        assert result["success"], result["stderr"]
        return result["stdout"].splitlines()

    def close(self):
        """End it."""
        self.service.close()
        shutil.rmtree(self.folder)


# Prints a line for each attempt: its name, and whether the kernel refused it. `OUT` is a folder of the user that runs
# the service, `VICTIM` a process of that user.
TRY = """
import ctypes, fcntl, os, resource, socket, sys, sysconfig
libc = ctypes.CDLL(None, use_errno=True)
OUT, VICTIM = {folder!r}, {victim}
def attempt(name, call):
    try: result = call()
    except (OSError, ValueError): result = -1
    print(name, 'refused' if result == -1 else f'open {{result!r}}')
"""


def attempts(cage, num_checks, code, victim=0):
    """Run attempts, none of which may succeed."""
    lines = cage.lines(TRY.format(folder=str(cage.folder), victim=victim) + code)
    assert lines and [line for line in lines if not line.endswith(" refused")] == []
    num_checks[0] += len(lines) - 1
    return len(lines)


@functools.cache
def python_of_others():
    """A Python that every user can run; None where there is none that is new enough.

    This one may lie where root alone can read it.
    """
    for python in (sys.executable, shutil.which("python3", path="/usr/bin")):
        check = [str(python), "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
        try:
            if python and not subprocess.run(check, user=_USER_ID, group=_USER_ID, cwd="/").returncode:
                return python
        except OSError:
            continue
    return None


class OtherUsersService:
    """The methods of a `PythonExecutorService` in a program of an ordinary user."""

    def __init__(self, level, folder, landlock):
        if (python := python_of_others()) is None:
            raise IsolationError("No Python is there that an ordinary user can run.")
        package = Path(launch.__file__).parent.parent
        for name in ("sandbox", "_utils"):
            shutil.copytree(package / name, folder / "llmrl" / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(package / "__init__.py", folder / "llmrl")
        shutil.copy(__file__, folder)
        subprocess.run([python, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        for path in (folder, *folder.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
                os.chown(path, _USER_ID, _USER_ID)
        self._process = subprocess.Popen(
            [folder / "venv/bin/python", "cages.py", level, json.dumps(asdict(LIMITS)), json.dumps(landlock)],
            env={"LLMRL_TEST_SECRET": SECRET, "PATH": os.environ["PATH"]},
            user=_USER_ID, group=_USER_ID, extra_groups=[], cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._group = self._delegate()
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._answers, self._reader = {}, threading.Thread(target=self._read, daemon=True)
        self._numbers, self._lock = itertools.count(), threading.Lock()
        if error := json.loads(self._process.stdout.readline()):
            self.close()
            raise IsolationError(error)
        self._reader.start()

    def _delegate(self):
        """Where this program may divide its control group, give the other one a group of its own, as a manager does."""
        try:
            own, version = delegated_group()
            group = own / f"llmrl-test-{self._process.pid}"
            group.mkdir()
        except OSError:
            return None
        if version == 2:
            os.setxattr(group, "trusted.delegate", b"1")
            os.setxattr(group, "user.delegate", b"1")
        (group / "cgroup.procs").write_text(str(self._process.pid))
        for path in (group, *group.glob("cgroup.*")):
            os.chown(path, _USER_ID, _USER_ID)
        return group

    def _read(self):
        for line in self._process.stdout:
            number, answer = json.loads(line)
            self._answers.pop(number).set_result(answer)

    def _ask(self, name, arguments):
        answer, number = Future(), next(self._numbers)
        self._answers[number] = answer
        with self._lock:
            self._process.stdin.write(json.dumps([number, name, arguments]) + "\n")
            self._process.stdin.flush()
        return answer.result(120)

    def execute(self, code, session=None, timeout=None):
        return self._ask("execute", [code, session, timeout])

    def release(self, session):
        self._ask("release", [session])

    @property
    def description(self):
        return self._ask("description", None)

    @property
    def num_sessions(self):
        return self._ask("num_sessions", None)

    def close(self):
        self._process.stdin.close()
        self._process.wait(60)
        if self._reader.is_alive():
            self._reader.join()
        self._process.stdout.close()
        if self._group is not None:
            while any(path.read_text() for path in self._group.rglob("cgroup.procs")):
                time.sleep(0.01)
            for group in (*self._group.glob("llmrl-*"), self._group):
                group.rmdir()


def serve(level, limits, landlock):
    """Answer what the tests ask over the standard streams."""
    logging.disable()
    if (version := json.loads(landlock)) is not None:
        elder = f"from llmrl.sandbox import kernel; kernel.landlock_version = lambda: {version}; main()"
        launch._CODE = launch._CODE.replace("main()", elder)
    lock = threading.Lock()

    def say(value):
        with lock:
            print(json.dumps(value), flush=True)

    sys.stdin.readline()  # it is in its control group
    try:
        limits = PythonLimits(**json.loads(limits))
        service = PythonExecutorService(timeout=_TIMEOUT_S, isolation=level, limits=limits, num_ready=2)
    except IsolationError as error:
        say(str(error))
        return
    say("")

    def answer(line):
        number, name, arguments = json.loads(line)
        value = getattr(service, name)
        say([number, value if arguments is None else value(*arguments)])

    for line in sys.stdin:
        threading.Thread(target=answer, args=(line,), daemon=True).start()
    service.close()


__all__ = ["LEVELS", "LIMITS", "USERS", "Cage", "IsolationError"]

if __name__ == "__main__":
    serve(*sys.argv[1:])
