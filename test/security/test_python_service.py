"""The service of interpreters: levels, sessions, and its own end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
from waiting import wait_until

from llmrl.cli import doctor
from llmrl.sandbox import frames, launch
from llmrl.sandbox.launch import IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService
from llmrl.sandbox.supervisor import remove_folder


@pytest.fixture(scope="module")
def service():
    service = PythonExecutorService(timeout=60, num_ready=2)
    yield service
    service.close()


def children_of(process):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    return [int(word) for word in listed.split()]


def test_without_a_session_each_call_starts_afresh(service):
    assert service.execute("x = 1")["success"]
    assert "NameError" in service.execute("print(x)")["stderr"]


def test_sessions_keep_their_own_variables(service):
    service.execute("x = 1", session="a")
    service.execute("x = 2", session="b")
    assert [service.execute("print(x)", session=name)["stdout"] for name in "ab"] == ["1\n", "2\n"]
    service.release("a")
    assert "NameError" in service.execute("print(x)", session="a")["stderr"]
    for name in "ab":
        service.release(name)


def test_a_traceback_shows_the_line(service):
    stderr = service.execute("def f():\n    return 1 / 0\nf()")["stderr"]
    assert stderr.startswith("Traceback (most recent call last):\n") and "return 1 / 0" in stderr
    assert "interpreter.py" not in stderr
    # Ends of lines are Python's, not all that Unicode knows.
    stderr = service.execute("x = '\u2028\x0c\x85'\r\n\r1 / 0  # here\n")["stderr"]
    assert "line 3, in <module>" in stderr and "1 / 0  # here" in stderr
    assert "SyntaxError" in service.execute("def")["stderr"]


def test_a_call_costs_milliseconds(service):
    service.execute("1", session="timed")
    seconds = []
    for _ in range(50):
        started = time.perf_counter()
        service.execute("1", session="timed")
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.02
    service.release("timed")


@pytest.mark.slow
@pytest.mark.parametrize("level", launch.LEVELS)
def test_an_abandoned_call_is_killed(level):
    async def give_up():
        async with asyncio.timeout(0.3):
            await service.run("import os\nos.system('sleep 600 # hostile')", session="chat", timeout=60)

    try:
        service = PythonExecutorService(isolation=level, num_ready=1)
    except IsolationError as error:
        pytest.skip(str(error))
    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert "NameError" in service.execute("print(os)", session="chat")["stderr"]
    service.close()


def test_code_that_is_too_long_leaves_the_session_as_it_is(service):
    service.execute("x = 1", session="long")
    told = service.execute(f"x = '{'a' * 17_000_000}'", session="long")
    assert not told["success"] and "longer than 16 MiB, and were not run" in told["stderr"]
    assert service.execute("print(x)", session="long")["stdout"] == "1\n"
    service.release("long")


@pytest.mark.parametrize("timeout", [3e6, float("inf")])
def test_a_timeout_may_be_as_long_as_one_likes(service, timeout):
    assert service.execute("print(1)", timeout=timeout)["stdout"] == "1\n"


@pytest.mark.slow
def test_processor_time_is_limited():
    service = PythonExecutorService(timeout=20.0, limits=PythonLimits(cpu_seconds=0.1), num_ready=1)
    try:
        assert "of processor time and was stopped" in service.execute("while True: pass")["stderr"]
    finally:
        service.close()


def test_the_level_in_force_is_said_once_and_can_be_required(caplog, monkeypatch):
    with caplog.at_level("INFO", logger="llmrl"):
        service = PythonExecutorService(isolation="process", num_ready=1)
        service.execute("1")
    assert service.isolation == "process"
    service.close()
    said = [record.message for record in caplog.records if "isolation" in record.message]
    assert len(said) == 1 and "process: resource limits" in said[0]
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    with pytest.raises(IsolationError, match=r"bubblewrap: the program bwrap .* is not installed"):
        PythonExecutorService(isolation="bubblewrap")


def test_a_level_that_fails_is_passed_over(monkeypatch):
    start = launch.Launcher._start_zygote

    def refuse(self):
        if self.level == "namespaces":
            raise IsolationError("namespaces are not available here.")
        start(self)

    monkeypatch.setattr(launch.Launcher, "_start_zygote", refuse)
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    service = PythonExecutorService(num_ready=1)
    assert service.isolation == "process" and service.execute("print(1)")["stdout"] == "1\n"
    service.close()
    with pytest.raises(IsolationError, match="namespaces"):
        PythonExecutorService(isolation="namespaces")


def test_what_starts_interpreters_is_started_again_when_it_dies(service):
    zygote = service._launcher._processes[-1]
    os.kill(zygote.pid, signal.SIGKILL)
    zygote.wait()
    assert [service.execute(f"print({n})")["stdout"] for n in range(6)] == [f"{n}\n" for n in range(6)]


@pytest.mark.parametrize(("greeting", "said"), [(b"", "is out of order"), (frames.encode({}), "lost this interpreter")])
def test_a_dead_service_process_is_not_blamed_on_the_code(monkeypatch, greeting, said):
    service = PythonExecutorService(num_ready=1, isolation="process")

    def start():
        ours, theirs = socket.socketpair()
        theirs.sendall(greeting)
        theirs.close()
        return ours

    while service._ready:
        service._ready.pop().close()
    monkeypatch.setattr(service._launcher, "start", start)
    result = service.execute("print(1)")
    service.close()
    assert not result["success"] and said in result["stderr"] and "the code" not in result["stderr"].lower()


@pytest.mark.parametrize(
    ("version", "user", "gaps"), [(0, 0, "files"), (0, 1000, "files and signals"), (4, 1000, "signals")]
)
def test_a_level_that_leaves_something_open_is_taken_only_when_asked_for(monkeypatch, version, user, gaps):
    start = launch.Launcher._start_zygote

    def refuse(self):
        if self.level == "namespaces":
            raise IsolationError("namespaces are not available here.")
        start(self)

    monkeypatch.setattr(launch.Launcher, "_start_zygote", refuse)
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    monkeypatch.setattr(launch.kernel, "landlock_version", lambda: version)
    monkeypatch.setattr(launch, "is_python_hidden", lambda prefixes: False)
    monkeypatch.setattr(launch.os, "getuid", lambda: user)
    with pytest.raises(IsolationError, match=f"does not confine {gaps} here"):
        PythonExecutorService(num_ready=1)
    if user == os.geteuid():
        PythonExecutorService(isolation="process", num_ready=1).close()


def test_root_without_the_rights_of_root_learns_which_it_lacks():
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv")
    code = (
        "from llmrl.sandbox.service import PythonExecutorService\n"
        "try: PythonExecutorService(isolation='process', num_ready=1)\n"
        "except RuntimeError as error: print(error)"
    )
    command = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True)
    assert "process: an interpreter does not start" in said.stdout and "CAP_SETUID" in said.stdout, said.stderr


def test_the_doctor_calls_a_machine_wrong_where_nothing_confines(monkeypatch):
    monkeypatch.setattr(launch.Launcher, "_start_zygote", raise_isolation_error)
    monkeypatch.setattr(launch.shutil, "which", lambda name: None)
    finding = doctor._isolation()
    assert finding.state == "wrong" and "apt install bubblewrap" in finding.advice
    assert "bubblewrap: the program bwrap" in finding.found


def raise_isolation_error(launcher):
    raise IsolationError("refused.")


@pytest.mark.slow
@pytest.mark.parametrize("level", launch.LEVELS)
def test_closing_ends_an_answer_that_never_ends(level):
    try:
        service = PythonExecutorService(isolation=level, num_ready=1)
    except IsolationError as error:
        pytest.skip(str(error))
    trickle = (
        "import os, time\nos.write(3, (900).to_bytes(4, 'little'))\nwhile True: time.sleep(0.05); os.write(3, b' ')"
    )

    def run():
        with contextlib.suppress(RuntimeError, CancelledError):
            service.execute(trickle, timeout=600)

    threading.Thread(target=run, daemon=True).start()
    time.sleep(0.3)
    folder = service._launcher.folder
    service.close()
    wait_until(lambda: not _with_folder(folder))


@pytest.mark.slow
@pytest.mark.parametrize("level", launch.LEVELS)
def test_nothing_outlives_the_program_however_it_ends(level):
    code = (
        "import os, threading, time\n"
        "from llmrl.sandbox.service import PythonExecutorService\n"
        f"service = PythonExecutorService(num_ready=2, isolation={level!r})\n"
        "service.execute('1', session='kept')\n"
        "run = lambda: service.execute('while True: pass', timeout=300)\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "time.sleep(0.3); print(service._launcher.folder, flush=True); os.kill(os.getpid(), 9)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    folder = program.stdout.readline().strip()
    program.wait()
    program.stdout.close()
    if not folder:
        pytest.skip(f"{level} is not available here")
    deadline = time.monotonic() + 240
    while (left := _with_folder(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def _with_folder(folder):
    """Processes of the service that used this folder: all were started with it among their settings."""
    found = []
    for path in Path("/proc").glob("[1-9]*/cmdline"):
        try:
            if folder.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_closing_ends_every_process():
    service = PythonExecutorService(num_ready=3)
    service.execute("1", session="kept")
    folder = service._launcher.folder
    assert _with_folder(folder)
    service.close()
    service.close()
    deadline = time.monotonic() + 240
    while _with_folder(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _with_folder(folder) and not Path(folder).exists()
    with pytest.raises(RuntimeError):
        service.execute("1")


def test_a_folder_is_removed_whatever_is_in_it(tmp_path):
    folder, kept = tmp_path / "folder", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    (kept / "file").write_text("kept")
    kept.chmod(0o750)
    (folder / "link").symlink_to(kept)
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    (folder / "wide").mkdir()
    for name in ("a\n", "\udcff", "b" * 255):
        (folder / "wide" / name).mkdir()
        (folder / "wide" / name / "link").symlink_to(kept)
    within = os.open(folder, os.O_RDONLY)
    for _ in range(3000):  # deeper than recursion, and longer than a path
        os.mkdir("deep", dir_fd=within)
        deeper = os.open("deep", os.O_RDONLY, dir_fd=within)
        os.close(within)
        within = deeper
    os.mkdir("shut", 0, dir_fd=within)
    os.close(within)
    (folder / "wide").chmod(0)
    remove_folder(str(folder))
    remove_folder(str(folder))
    assert not folder.exists() and (kept / "file").read_text() == "kept" and kept.stat().st_mode & 0o777 == 0o750


@pytest.mark.slow
@pytest.mark.parametrize("level", launch.LEVELS)
def test_closing_removes_folders_of_any_depth(level):
    try:
        service = PythonExecutorService(isolation=level, num_ready=1)
    except IsolationError as error:
        pytest.skip(str(error))
    code = "import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')\nprint('made')"
    assert service.execute(code, session="chat", timeout=60)["stdout"] == "made\n"
    folder = Path(service._launcher.folder)
    service.close()
    wait_until(lambda: not folder.exists())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"pool_size": 0}, "pool_size must be positive"),
        ({"timeout": 0}, "timeout must be positive"),
        ({"isolation": "gvisor"}, "isolation must be 'auto' or one of"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        PythonExecutorService(**arguments)


def test_limits_out_of_range_are_refused():
    with pytest.raises(ValueError, match="memory_bytes must be positive"):
        PythonLimits(memory_bytes=0)
