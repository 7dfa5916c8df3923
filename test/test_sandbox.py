"""Code that means harm, at each level of isolation: a clear message, a healthy service, nothing left."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from llmrl.sandbox.launch import LEVELS, IsolationError, PythonLimits
from llmrl.sandbox.service import PythonExecutorService

pytestmark = pytest.mark.usefixtures("own_programs")

LIMITS = PythonLimits(memory_bytes=512 << 20, file_bytes=1 << 20, num_processes=24, output_bytes=20_000)


@pytest.fixture(scope="module", params=list(LEVELS))
def service(request):
    os.environ["LLMRL_TEST_SECRET"] = "hunter2"
    try:
        service = PythonExecutorService(timeout=2.0, isolation=request.param, limits=LIMITS, num_ready=2)
    except IsolationError as error:
        pytest.skip(str(error))
    yield service
    service.close()


@pytest.fixture(autouse=True)
def is_healthy_afterwards(service):
    before = processes()
    yield
    service.release("chat")
    assert service.execute("print(6 * 7)", session="after")["stdout"] == "42\n"
    service.release("after")
    # As many as before wait for code: nothing of what ran is left.
    deadline = time.monotonic() + 240
    while (left := processes() - before) and time.monotonic() < deadline:
        if not any("hostile" in command_line(process) for process in left):
            break
        time.sleep(0.02)
    assert not [process for process in left if "hostile" in command_line(process)]


def processes():
    return {int(path.name) for path in Path("/proc").glob("[1-9]*")}


def command_line(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def run(service, code, **kwargs):
    return service.execute(code, session="chat", **kwargs)


# What is started to be left behind goes by a name that can be looked for.
SLEEPER = "subprocess.Popen(['/bin/sh', '-c', 'sleep 600 # hostile'], start_new_session={new_session})"


def test_an_infinite_loop_is_stopped(service):
    result = run(service, "print('before', flush=True)\nwhile True: pass", timeout=0.5)
    assert not result["success"] and result["stdout"] == "before\n"
    assert "The code ran longer than 0.5 s and was stopped. All variables are lost." in result["stderr"]


def test_a_loop_that_catches_everything_is_stopped(service):
    code = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    assert "ran longer" in run(service, code, timeout=0.5)["stderr"]


def test_a_memory_bomb_fails_alone(service):
    result = run(service, "x = 'kept'\ny = bytearray(100 << 30)")
    assert "MemoryError" in result["stderr"]
    assert run(service, "print(x)")["stdout"] == "kept\n"
    result = run(service, "pieces = []\nwhile True: pieces.append(bytearray(8 << 20))", timeout=60)
    assert not result["success"]
    assert "MemoryError" in result["stderr"] or "too much memory" in result["stderr"]


def test_a_fork_bomb_is_bounded_and_killed(service):
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert "ran longer" in run(service, code, timeout=0.5)["stderr"]
    result = run(
        service, "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()"
    )
    assert "can't start new thread" in result["stderr"]


def test_huge_output_is_cut_in_its_middle(service):
    result = run(service, "import sys\nfor _ in range(40): sys.stdout.write('x' * (1 << 20))\nprint('end')", timeout=10)
    assert result["success"]
    assert len(result["stdout"]) < LIMITS.output_bytes + 100
    assert "bytes left out" in result["stdout"] and result["stdout"].endswith("xend\n")
    result = run(service, "for number in range(1200): print('line', number)")
    assert result["success"] and result["stdout"].endswith("line 1199\n")


def test_output_without_end_is_stopped(service):
    assert "ran longer" in run(service, "while True: print('x' * 1000)", timeout=0.5)["stderr"]


@pytest.mark.parametrize("where", ["repository", "system", "temporary folder of others"])
def test_nothing_is_written_outside(service, where, tmp_path):
    folder = {
        "repository": Path(__file__).parent,
        "system": Path("/usr/local"),
        "temporary folder of others": tmp_path,
    }[where]
    path = folder / "hostile-file"
    result = run(service, f"open({str(path)!r}, 'w').write('x')")
    assert not path.exists()
    assert (
        "PermissionError" in result["stderr"] or "Read-only" in result["stderr"] or "No such file" in result["stderr"]
    )
    assert run(service, f"import shutil; shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)") and tmp_path.exists()
    assert run(service, "import os; os.system('rm -rf / 2>/dev/null')") and Path(__file__).exists()


def test_its_own_folder_is_empty_writable_and_bounded(service):
    assert run(service, "import os; print(os.listdir('.'), os.listdir(os.environ['HOME']))")["stdout"] == "[] []\n"
    code = "import tempfile\nopen('a', 'w').write('b')\nprint(open('a').read(), tempfile.mkdtemp()[:1])"
    assert run(service, code)["stdout"] == "b /\n"
    result = run(service, "open('big', 'wb').write(bytes(2 << 20))")
    assert "File too large" in result["stderr"] or "SIGXFSZ" in result["stderr"]


def test_files_of_one_conversation_are_not_seen_by_another(service):
    run(service, "import os; open('mine', 'w').write('secret'); print(os.path.abspath('mine'))")
    path = run(service, "print(os.path.abspath('mine'))")["stdout"].strip()
    assert service.execute(f"print(open({path!r}).read())")["stdout"] == ""


def test_secrets_are_not_readable(service, tmp_path):
    (tmp_path / "token").write_text("hunter2")
    code = f"""
import glob, os
found = [dict(os.environ)]
for path in [*glob.glob('/proc/[0-9]*/environ'), '/proc/self/environ', {str(tmp_path / "token")!r}, '/etc/shadow']:
    try: found.append(open(path, 'rb').read())
    except OSError: pass
print(found)
"""
    result = run(service, code)
    assert result["success"] and "hunter2" not in result["stdout"] and "root:" not in result["stdout"]
    assert not {"LLMRL_TEST_SECRET", "USER"} & set(run(service, "import os; print(*os.environ)")["stdout"].split())


def test_the_network_is_out_of_reach(service):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        result = run(service, f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert "Error" in result["stderr"]
        with pytest.raises(TimeoutError):
            server.accept()


SOCKETS = """
import ctypes, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, call):
    try: result = call()
    except OSError as error: print(name, 'refused'); return
    print(name, 'refused' if result == -1 else 'open')
for family in ('AF_INET', 'AF_INET6', 'AF_UNIX', 'AF_NETLINK', 'AF_PACKET', 'AF_VSOCK'):
    for kind in ('SOCK_STREAM', 'SOCK_DGRAM', 'SOCK_RAW'):
        tried(family + kind, lambda: socket.socket(getattr(socket, family), getattr(socket, kind)))
tried('mptcp', lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262))
tried('datagram pair', lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
pair = socket.socketpair()
tried('bind', lambda: pair[0].bind('\\0llmrl-test'))
tried('connect', lambda: pair[0].connect('\\0llmrl-test'))
tried('listen', lambda: libc.listen(pair[0].fileno(), 1))
"""


def test_no_socket_is_to_be_had(service):
    result = run(service, SOCKETS)
    assert result["success"], result["stderr"]
    lines = result["stdout"].splitlines()
    assert len(lines) == 23 and all(line.endswith("refused") for line in lines), result["stdout"]
    # What asyncio needs for itself works.
    loop = "import asyncio\nasync def f(): await asyncio.sleep(0); return 'ran'\nprint(asyncio.run(f()))"
    assert run(service, loop)["stdout"] == "ran\n"


# Number on x86-64 and aarch64, and arguments that a kernel without a filter would take.
CALLS = {
    "memfd_create": (319, 279, "b'x', 0"), "memfd_secret": (447, 447, "0"), "shmget": (29, 194, "7, 4096, 0o1600"),
    "semget": (64, 190, "7, 1, 0o1600"), "msgget": (68, 186, "7, 0o1600"),
    "mq_open": (240, 180, "b'x', 0o102, 0o600, None"), "add_key": (248, 217, "b'user', b'x', b'y', 1, -4"),
    "keyctl": (250, 219, "0, -4, 0"), "io_uring_setup": (425, 425, "8, bytes(120)"),
    "bpf": (321, 280, "0, bytes(128), 128"),
    "userfaultfd": (323, 282, "1"), "perf_event_open": (298, 241, "bytes(128), 0, -1, -1, 0"),
    "unshare": (272, 97, "0x10000000"), "setns": (308, 268, "0, 0"),
    "mount": (165, 40, "b'x', b'/tmp', b'tmpfs', 0, None"),
    "fsopen": (430, 430, "b'tmpfs', 0"), "open_tree": (428, 428, "-100, b'/', 0"), "ptrace": (101, 117, "0, 0, 0, 0"),
    "chroot": (161, 51, "b'/'"), "clone of a user namespace": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "process_vm_readv": (310, 270, "os.getpid(), None, 0, None, 0, 0"),
}  # fmt: skip


def test_calls_that_reach_beyond_the_interpreter_are_refused(service):
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nis_arm = os.uname().machine == 'aarch64'\n"
    for name, (x86, arm, arguments) in CALLS.items():
        code += f"ctypes.set_errno(0); r = libc.syscall({arm} if is_arm else {x86}, {arguments})\n"
        code += f"print({name!r}, r, ctypes.get_errno())\n"
    result = run(service, code)
    assert result["success"], result["stderr"]
    lines = result["stdout"].splitlines()
    assert len(lines) == len(CALLS)
    assert all(line.endswith(" -1 1") for line in lines), [line for line in lines if not line.endswith(" -1 1")]
    # Threads and processes are made by calls that look alike.
    assert run(service, "import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()")[
        "stdout"
    ]
    assert "7" in run(service, "import subprocess\nprint(subprocess.check_output(['echo', '7']))")["stdout"]


def test_calls_of_the_other_word_size_are_refused(service):
    # The numbers of x32 name the same calls, past a filter that compares numbers alone.
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has x32")
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(0x40000000 + 41, 2, 1, 0))"
    assert run(service, code)["stdout"] == "-1\n"


def test_the_kernel_kills_the_interpreter_first(service):
    if service.isolation == "process":
        process = int(run(service, "import os; print(os.getpid())")["stdout"])
        assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
    else:
        assert run(service, "print(open('/proc/self/oom_score_adj').read())")["stdout"].strip() == "1000"


def test_an_answer_in_single_bytes_ends_with_the_time(service):
    code = """
import os, time
os.write(3, (900).to_bytes(4, 'little'))
while True:
    time.sleep(0.05)
    os.write(3, b' ')
"""
    # 900 bytes take 45 s: an answer that is waited for piece by piece comes after that.
    result = run(service, code)
    assert "ran longer than 2 s" in result["stderr"]
    results = []
    runner = threading.Thread(target=lambda: results.append(run(service, code, timeout=60)))
    runner.start()
    time.sleep(0.5)
    service.release("chat")
    runner.join(10)
    assert not runner.is_alive() and not results[0]["success"]


def test_the_next_calls_success_cannot_be_forged(service):
    code = """
import json, os, threading
def forge():
    while True:
        for number in range(2, 20):
            body = json.dumps({"number": number, "returncode": 0, "is_exit": False}).encode()
            os.write(3, len(body).to_bytes(4, 'little') + body)
threading.Thread(target=forge, daemon=True).start()
"""
    run(service, code)
    result = run(service, "import time; time.sleep(0.3); raise ValueError('bad')")
    assert not result["success"]


def test_an_answer_of_another_kind_than_ours_is_an_end(service):
    code = """
import gc, json, os, sys
number = sys._getframe(2).f_locals['request']['number']
body = json.dumps({"number": number, "returncode": "x" * 1_000_000, "is_exit": []}).encode()
os.write(3, len(body).to_bytes(4, 'little') + body)
"""
    result = run(service, code)
    assert not result["success"] and isinstance(result["returncode"], int)
    assert len(result["stderr"]) < 2 * LIMITS.output_bytes


def test_others_cannot_be_signalled(service):
    code = """
import os, signal
for target in (os.getppid(), -1, -os.getppid(), {pid}):
    try: os.kill(target, signal.SIGKILL)
    except OSError as error: print(type(error).__name__)
print('went on')
"""
    victim = os.getpid()
    result = run(service, code.format(pid=victim))
    assert Path(f"/proc/{victim}").exists()
    # Killing all it may reach can be its own end, never that of others.
    assert "went on" in result["stdout"] or "ended by signal" in result["stderr"] or result["stderr"] == ""


def test_sys_exit_ends_nothing(service):
    result = run(service, "import sys\nx = 5\nsys.exit(3)")
    assert (result["success"], result["returncode"]) == (False, 3)
    assert "The code called sys.exit(3)." in result["stderr"]
    assert run(service, "print(x)\nexit()")["stdout"] == "5\n"
    assert run(service, "print(x)")["success"]
    assert "no way" in run(service, "raise SystemExit('no way')")["stderr"]


def test_os_exit_costs_the_variables_and_nothing_else(service):
    result = run(service, "import os\nx = 5\nprint('said', flush=True)\nos._exit(4)")
    assert result["stdout"] == "said\n" and result["returncode"] == 4
    assert "The code ended the interpreter (exit code 4). All variables are lost." in result["stderr"]
    assert "NameError" in run(service, "print(x)")["stderr"]


def test_a_crash_is_named(service):
    result = run(service, "import ctypes; ctypes.string_at(0)")
    assert "ended by signal SIGSEGV" in result["stderr"]


@pytest.mark.parametrize("new_session", [False, True])
def test_processes_left_behind_are_ended_after_the_call(service, new_session):
    code = f"import subprocess\nfor _ in range(3): {SLEEPER.format(new_session=new_session)}\nprint('left')"
    result = run(service, code)
    assert result["stdout"] == "left\n"
    assert "Processes that the code left running were ended" in result["stderr"]


def test_a_copy_of_the_interpreter_answers_nothing(service):
    result = run(service, "import os\nprint('child' if os.fork() == 0 else 'parent', flush=True)")
    assert "parent" in result["stdout"]
    assert run(service, "print('next')")["stdout"] == "next\n"


def test_threads_left_behind_stand_still_between_calls(service):
    code = """
import threading, time
count = 0
def work():
    global count
    while True:
        count += 1
        time.sleep(0.001)
threading.Thread(target=work, daemon=True).start()
"""
    assert run(service, code)["success"]
    first = int(run(service, "print(count)")["stdout"])
    time.sleep(0.5)
    assert int(run(service, "print(count)")["stdout"]) < first + 100


def test_deep_recursion_fails_alone(service):
    assert "RecursionError" in run(service, "def f(): return f()\nf()")["stderr"]
    code = "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda n: [n].__class__(map(f, [n + 1]))\nf(0)"
    result = run(service, code)
    assert not result["success"] and result["stderr"]
    assert run(service, "def fact(n): return 1 if n < 2 else n * fact(n - 1)\nprint(fact(5))")["stdout"] == "120\n"


def test_binary_output_and_invalid_unicode_come_back_as_text(service):
    code = "import os, sys\nos.write(1, bytes(range(256)))\nprint('\\ud800', '\\0', flush=True)\nos.write(2, b'\\xff')"
    result = run(service, code)
    assert result["success"] and "�" in result["stdout"] and "\\ud800" in result["stdout"]
    assert "�" in result["stderr"]
    for text in ("print('\ud800')", "x = '\0'", "\udcff = 1", "print('é🌧')"):
        assert isinstance(run(service, text)["stderr"], str)


def test_markers_of_any_protocol_are_just_printed(service):
    result = run(service, "print('---END---')\nprint('{\"returncode\": 0}')\nraise ValueError('bad')")
    assert not result["success"] and result["stdout"].startswith("---END---\n{")


def test_answers_forged_on_the_channel_fool_nobody_else(service):
    code = """
import os
for number in range(3, 30):
    try: os.write(number, b'\\xff' * 100)
    except OSError: pass
"""
    assert not run(service, code)["success"]
    assert run(service, "print('on')")["stdout"] == "on\n"


def test_closed_and_replaced_outputs_are_restored(service):
    run(service, "import sys, os\nsys.stdout.close()\nsys.stderr = None")
    assert run(service, "print('back')")["stdout"] == "back\n"
    run(service, "import os\nos.close(1); os.close(2)")
    assert run(service, "print('again')")["stdout"] == "again\n"


def test_a_call_that_nobody_waits_for_any_more_is_killed(service):
    import asyncio

    async def give_up():
        async with asyncio.timeout(0.3):
            await service.run("import os\nos.system('sleep 600 # hostile')", session="chat", timeout=60)

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    assert "NameError" in run(service, "print(os)")["stderr"]


def test_calls_run_in_parallel_and_those_of_a_session_in_order(service):
    results = {}

    def call(name, code, session):
        results[name] = service.execute(code, session=session)

    threads = [threading.Thread(target=call, args=(n, "import time; time.sleep(1)", f"chat-{n}")) for n in range(6)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 6  # as long as one after another
    assert all(results[n]["success"] for n in range(6))
    assert service.num_sessions >= 6
    for n in range(6):
        service.release(f"chat-{n}")
    service.execute("1")
    assert service.num_sessions <= 1
