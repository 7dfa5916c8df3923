"""Code that means harm, at each level of isolation: a clear message, a healthy service, nothing left."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cages import HOSTILE, LIMITS, SECRET, attempts
from waiting import patient, wait_until

pytestmark = pytest.mark.usefixtures("own_programs")

SLEEPER = f"subprocess.Popen(['/bin/sh', '-c', 'sleep 600 # {HOSTILE}'], start_new_session={{new_session}})"


def test_an_infinite_loop_is_stopped(cage):
    def attempt(limit):
        result = cage.run("print('before', flush=True)\nwhile True: pass", timeout=limit)
        assert not result["success"]
        assert f"The code ran longer than {limit:g} s and was stopped. All variables are lost." in result["stderr"]
        return result["stdout"] or None

    assert patient(attempt) == "before\n"


def test_a_loop_that_catches_everything_is_stopped(cage):
    code = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    assert "ran longer" in cage.run(code, timeout=0.5)["stderr"]


def test_a_memory_bomb_fails_alone(cage):
    result = cage.run("x = 'kept'\ny = bytearray(100 << 30)")
    assert "MemoryError" in result["stderr"]
    assert cage.run("print(x)")["stdout"] == "kept\n"
    result = cage.run("pieces = []\nwhile True: pieces.append(bytearray(8 << 20))", timeout=60)
    assert not result["success"]
    assert "MemoryError" in result["stderr"] or "too much memory" in result["stderr"]


def test_a_fork_bomb_is_bounded_and_killed(cage):
    code = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert "ran longer" in cage.run(code, timeout=0.5)["stderr"]
    result = cage.run(
        "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()"
    )
    assert "can't start new thread" in result["stderr"]


def test_huge_output_is_cut_in_its_middle(cage):
    result = cage.run("import sys\nfor _ in range(40): sys.stdout.write('x' * (1 << 20))\nprint('end')")
    assert result["success"]
    assert len(result["stdout"]) < LIMITS.output_bytes + 100
    assert "bytes left out" in result["stdout"] and result["stdout"].endswith("xend\n")
    result = cage.run("for number in range(1200): print('line', number)")
    assert result["success"] and result["stdout"].endswith("line 1199\n")


def test_output_without_end_is_stopped(cage):
    assert "ran longer" in cage.run("while True: print('x' * 1000)", timeout=0.5)["stderr"]


FILES_OUTSIDE = """
home = os.environ['HOME']
folders = [OUT, '/', '/dev', '/dev/shm', '/dev/mqueue', '/dev/pts', '/proc', '/proc/self', '/sys', '/sys/fs/cgroup',
           '/etc', '/usr', '/usr/local', '/usr/lib', '/bin', '/var', '/var/tmp', '/run', '/home', '/srv', '/mnt',
           sysconfig.get_paths()['purelib'], sysconfig.get_paths()['stdlib'], os.path.dirname(home)]
for folder in folders:
    if os.path.realpath(folder) == os.path.realpath(home): continue
    path = folder + '/hostile-file'
    attempt('create in ' + folder, lambda: open(path, 'w').close())
    attempt('folder in ' + folder, lambda: os.mkdir(path))
    attempt('link to ' + folder, lambda: os.symlink('/', path))
    attempt('pipe in ' + folder, lambda: os.mkfifo(path))
secret = OUT + '/secret'
for mode in ('r', 'r+', 'a', 'w'):
    attempt('open ' + mode, lambda: open(secret, mode).close())
attempt('list', lambda: [name for name in os.listdir(OUT) if name == 'secret'] or -1)
attempt('unlink', lambda: os.unlink(secret))
attempt('rename', lambda: os.rename(secret, OUT + '/other'))
attempt('take', lambda: os.rename(secret, home + '/taken'))
attempt('hard link', lambda: os.link(secret, home + '/taken'))
attempt('truncate', lambda: os.truncate(secret, 0))
attempt('chmod', lambda: os.chmod(secret, 0o666))
attempt('chmod of the folder', lambda: os.chmod(OUT, 0o777))
attempt('chown', lambda: os.chown(secret, os.getuid(), os.getgid()))
attempt('time', lambda: os.utime(secret, (1, 1)))
attempt('attribute', lambda: os.setxattr(secret, 'user.a', b'b'))
attempt('mount', lambda: libc.mount(b'none', OUT.encode(), b'tmpfs', 0, None))
"""


def test_nothing_outside_is_read_made_or_changed(cage, num_checks):
    before = cage.folder.stat(), (cage.folder / "secret").stat()
    attempts(cage, num_checks, FILES_OUTSIDE)
    # Neither modes nor times, which Landlock would let a process change.
    assert (cage.folder.stat(), (cage.folder / "secret").stat()) == before
    assert (cage.folder / "secret").read_text() == SECRET
    assert cage.run("import os; os.system('rm -rf / 2>/dev/null')") and Path(__file__).exists()


OTHER_PROCESSES = """
parent = os.getppid()
for process in (VICTIM, parent, 1):
    for name in ('mem', 'environ', 'maps', 'cwd/.', 'root/.', 'fd/0', 'exe', 'auxv', 'stack', 'ns/net'):
        path = f'/proc/{process}/{name}'
        attempt(path, lambda: open(path, 'rb').close())
        attempt('write ' + path, lambda: open(path, 'r+b').close())
    for name in ('oom_score_adj', 'comm', 'autogroup', 'coredump_filter', 'clear_refs', 'uid_map', 'setgroups'):
        path = f'/proc/{process}/{name}'
        attempt('write ' + path, lambda: open(path, 'r+b').close())
    attempt('limits', lambda: resource.prlimit(process, resource.RLIMIT_CORE, (0, 0)))
    attempt('processors', lambda: os.sched_setaffinity(process, {0}))
    attempt('scheduler', lambda: os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0)))
    attempt('priority', lambda: os.setpriority(os.PRIO_PROCESS, process, 19))
    attempt('session', lambda: os.setpgid(process, 0))
attempt('priority of the user', lambda: os.setpriority(os.PRIO_USER, os.getuid(), 19))
attempt('own score', lambda: open('/proc/self/oom_score_adj', 'w').close())
"""


def state_of(process):
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    processors, scheduler = os.sched_getaffinity(process.pid), os.sched_getscheduler(process.pid)
    return limits, processors, scheduler, os.getpriority(os.PRIO_PROCESS, process.pid)


def test_other_processes_are_neither_read_nor_changed(cage, num_checks):
    credentials = {"user": cage.uid, "group": cage.uid} if os.getuid() == 0 else {}
    victim = subprocess.Popen(["sleep", "600"], **credentials)
    try:
        before = state_of(victim)
        attempts(cage, num_checks, OTHER_PROCESSES, victim.pid)
        assert state_of(victim) == before
        signals = f"""
for number in (9, 19, 15, 1):
    for target in (VICTIM, -VICTIM, {os.getpid()}):
        attempt(f'signal {{number}} to {{target}}', lambda: os.kill(target, number))
pipe = os.pipe()
try:
    fcntl.fcntl(pipe[0], fcntl.F_SETOWN, VICTIM)
    fcntl.fcntl(pipe[0], fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.write(pipe[1], b'x')  # the kernel would signal the pipe's owner
except (ProcessLookupError, PermissionError): pass
"""
        attempts(cage, num_checks, signals, victim.pid)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_its_own_folder_is_empty_writable_and_bounded(cage):
    assert cage.run("import os; print(os.listdir('.'), os.listdir(os.environ['HOME']))")["stdout"] == "[] []\n"
    code = "import tempfile\nopen('a', 'w').write('b')\nprint(open('a').read(), tempfile.mkdtemp()[:1])"
    assert cage.run(code)["stdout"] == "b /\n"
    result = cage.run("open('big', 'wb').write(bytes(2 << 20))")
    assert "File too large" in result["stderr"] or "SIGXFSZ" in result["stderr"]


def test_files_in_memory_are_bounded_in_number_and_size(cage):
    if cage.level == "process":
        pytest.skip("its folder is on the disk")
    code = f"""
import os
sizes = []
try:
    while len(sizes) < 40_000:
        open(str(len(sizes)), 'wb').close()
        sizes.append(0)
except OSError: pass
print(len(sizes))
for name in range(len(sizes)): os.unlink(str(name))
try:
    for number in range(200):
        with open(str(number), 'wb') as file: file.write(bytes({LIMITS.file_bytes}))
except OSError: pass
print(sum(entry.stat().st_size for entry in os.scandir('.')))
for entry in os.scandir('.'): os.unlink(entry)
"""
    num_files, num_bytes = map(int, cage.lines(code))
    # The program bubblewrap knows no bound on the number.
    assert num_files <= LIMITS.folder_bytes >> 12 or cage.level == "bubblewrap"
    assert LIMITS.folder_bytes // 2 < num_bytes <= LIMITS.folder_bytes


def test_files_of_one_conversation_are_not_seen_by_another(cage):
    cage.run("import os; open('mine', 'w').write('secret'); print(os.path.abspath('mine'))")
    path = cage.run("print(os.path.abspath('mine'))")["stdout"].strip()
    assert cage.service.execute(f"print(open({path!r}).read())")["stdout"] == ""


def test_secrets_are_not_readable(cage):
    code = f"""
import glob, os
found = [dict(os.environ)]
for path in [*glob.glob('/proc/[0-9]*/environ'), '/proc/self/environ', {str(cage.folder / "secret")!r}, '/etc/shadow']:
    try: found.append(open(path, 'rb').read())
    except OSError: pass
print(found)
"""
    result = cage.run(code)
    assert result["success"] and SECRET not in result["stdout"] and "root:" not in result["stdout"]
    assert not {"LLMRL_TEST_SECRET", "USER"} & set(cage.run("import os; print(*os.environ)")["stdout"].split())


def test_the_network_is_out_of_reach(cage):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        result = cage.run(f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)")
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


def test_no_socket_is_to_be_had(cage, num_checks):
    result = cage.run(SOCKETS)
    assert result["success"], result["stderr"]
    lines = result["stdout"].splitlines()
    assert len(lines) == 23 and all(line.endswith("refused") for line in lines), result["stdout"]
    num_checks[0] += len(lines) - 1
    # What asyncio needs for itself works.
    loop = "import asyncio\nasync def f(): await asyncio.sleep(0); return 'ran'\nprint(asyncio.run(f()))"
    assert cage.run(loop)["stdout"] == "ran\n"


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
    "process_vm_writev": (311, 271, "os.getpid(), None, 0, None, 0, 0"), "setpriority": (141, 140, "0, 0, 19"),
    "ioprio_set": (251, 30, "1, 0, 3 << 13"), "sched_setscheduler": (144, 119, "0, 5, bytes(4)"),
    "sched_setattr": (314, 274, "0, (48).to_bytes(4, 'little') + bytes(44), 0"),
    "inotify_add_watch": (254, 27, "libc.inotify_init1(0), b'/usr', 2"), "fanotify_init": (300, 262, "0, 0"),
    "personality": (135, 92, "0x0040000"), "kcmp": (312, 272, "os.getpid(), os.getpid(), 0, 0, 0"),
    "syslog": (103, 116, "10, None, 0"), "open_by_handle_at": (304, 265, "0, bytes(16), 0"),
    "request_key": (249, 218, "b'user', b'x', None, -4"), "semop": (65, 193, "0, bytes(6), 1"),
    "move_mount": (429, 429, "-100, b'/', -100, b'/tmp', 0"), "sethostname": (170, 161, "b'x', 1"),
    "fsmount": (432, 432, "0, 0, 0"), "pidfd_getfd": (438, 438, "0, 0, 0"),
    "io_uring_register": (427, 427, "0, 0, None, 0"), "pivot_root": (155, 41, "b'/', b'/'"),
}  # fmt: skip


def test_calls_that_reach_beyond_the_interpreter_are_refused(cage, num_checks):
    code = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\nis_arm = os.uname().machine == 'aarch64'\n"
    for name, (x86, arm, arguments) in CALLS.items():
        code += f"ctypes.set_errno(0); r = libc.syscall({arm} if is_arm else {x86}, {arguments})\n"
        code += f"print({name!r}, r, ctypes.get_errno())\n"
    result = cage.run(code)
    assert result["success"], result["stderr"]
    lines = result["stdout"].splitlines()
    assert len(lines) == len(CALLS)
    num_checks[0] += len(lines) - 1
    # Those of Linux 5.1 and later have one number everywhere, and are said not to exist.
    expected = {f"{name} -1 {1 if arm < 424 else 38}" for name, (_, arm, _) in CALLS.items()}
    assert set(lines) == expected
    # Threads and processes are made by calls that look alike.
    assert cage.run("import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()")["stdout"]
    assert "7" in cage.run("import subprocess\nprint(subprocess.check_output(['echo', '7']))")["stdout"]


def test_calls_of_the_other_word_size_are_refused(cage):
    # The numbers of x32 name the same calls, past a filter that compares numbers alone.
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has x32")
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(0x40000000 + 41, 2, 1, 0))"
    assert cage.run(code)["stdout"] == "-1\n"


def test_calls_by_the_32_bit_interrupt_end_the_process(cage):
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has it")
    code = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))  # getpid, by int 0x80
print(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))())
"""
    result = cage.run(code)
    assert not result["success"] and "SIGSYS" in result["stderr"] and result["stdout"] == ""


def test_the_kernel_kills_the_interpreter_first(cage):
    if cage.level == "process":
        process = int(cage.run("import os; print(os.getpid())")["stdout"])
        assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
    else:
        assert cage.run("print(open('/proc/self/oom_score_adj').read())")["stdout"].strip() == "1000"


def test_an_answer_in_single_bytes_ends_with_the_time(cage):
    code = """
import os, time
os.write(3, (900).to_bytes(4, 'little'))
while True:
    time.sleep(0.5)
    os.write(3, b' ')
"""
    # 900 bytes take 450 s: an answer that is waited for piece by piece comes after that.
    result = cage.run(code, timeout=1)
    assert "ran longer than 1 s" in result["stderr"]
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(cage.run, code, timeout=300)
        time.sleep(0.5)
        while not call.done():  # it may not have begun
            cage.service.release("chat")
            time.sleep(0.1)
    assert not call.result()["success"]


def test_the_next_calls_success_cannot_be_forged(cage):
    code = """
import json, os, threading
def forge():
    while True:
        for number in range(2, 20):
            body = json.dumps({"number": number, "returncode": 0, "is_exit": False}).encode()
            os.write(3, len(body).to_bytes(4, 'little') + body)
threading.Thread(target=forge, daemon=True).start()
"""
    cage.run(code)
    result = cage.run("import time; time.sleep(0.3); raise ValueError('bad')")
    assert not result["success"]


def test_an_answer_of_another_kind_than_ours_is_an_end(cage):
    code = """
import gc, json, os, sys
number = sys._getframe(2).f_locals['request']['number']
body = json.dumps({"number": number, "returncode": "x" * 1_000_000, "is_exit": []}).encode()
os.write(3, len(body).to_bytes(4, 'little') + body)
"""
    result = cage.run(code)
    assert not result["success"] and isinstance(result["returncode"], int)
    assert len(result["stderr"]) < 2 * LIMITS.output_bytes


def test_signals_to_all_reach_no_supervisor(cage):
    code = """
import os, signal
for target in (os.getppid(), -1, -os.getppid()):
    try: os.kill(target, signal.SIGKILL)
    except OSError as error: print(type(error).__name__)
print('went on')
"""
    result = cage.run(code)
    # Killing all it may reach can be its own end, never that of others.
    assert "went on" in result["stdout"] or "ended by signal" in result["stderr"] or result["stderr"] == ""


def test_a_supervisor_that_is_asked_to_stop_serves_on(cage):
    cage.run("import os, signal\ntry: os.kill(os.getppid(), signal.SIGSTOP)\nexcept OSError: pass")
    assert cage.lines("print('serves on')") == ["serves on"]


def test_calls_newer_than_the_filter_do_not_exist(cage):
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nprint(libc.syscall(470, 0), ctypes.get_errno())"
    assert cage.lines(code) == ["-1 38"]


def test_sys_exit_ends_nothing(cage):
    result = cage.run("import sys\nx = 5\nsys.exit(3)")
    assert (result["success"], result["returncode"]) == (False, 3)
    assert "The code called sys.exit(3)." in result["stderr"]
    assert cage.run("print(x)\nexit()")["stdout"] == "5\n"
    assert cage.run("print(x)")["success"]
    assert "no way" in cage.run("raise SystemExit('no way')")["stderr"]


def test_os_exit_costs_the_variables_and_nothing_else(cage):
    result = cage.run("import os\nx = 5\nprint('said', flush=True)\nos._exit(4)")
    assert result["stdout"] == "said\n" and result["returncode"] == 4
    assert "The code ended the interpreter (exit code 4). All variables are lost." in result["stderr"]
    assert "NameError" in cage.run("print(x)")["stderr"]


def test_a_crash_is_named(cage):
    result = cage.run("import ctypes; ctypes.string_at(0)")
    assert "ended by signal SIGSEGV" in result["stderr"]


@pytest.mark.parametrize("new_session", [False, True])
def test_processes_left_behind_are_ended_after_the_call(cage, new_session):
    code = f"import subprocess\nfor _ in range(3): {SLEEPER.format(new_session=new_session)}\nprint('left')"
    result = cage.run(code)
    assert result["stdout"] == "left\n"
    assert "Processes that the code left running were ended" in result["stderr"]


def test_a_copy_of_the_interpreter_answers_nothing(cage):
    result = cage.run("import os\nprint('child' if os.fork() == 0 else 'parent', flush=True)")
    assert "parent" in result["stdout"]
    assert cage.run("print('next')")["stdout"] == "next\n"


def test_threads_left_behind_stand_still_between_calls(cage):
    code = """
import threading, time
gap = 0
def work():
    global gap
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        last, gap = time.monotonic(), max(gap, time.monotonic() - last)
threading.Thread(target=work, daemon=True).start()
"""
    assert cage.run(code)["success"]
    time.sleep(0.5)
    wait_until(lambda: float(cage.lines("time.sleep(0.01); print(gap)")[0]) > 0.4)


def test_deep_recursion_fails_alone(cage):
    assert "RecursionError" in cage.run("def f(): return f()\nf()")["stderr"]
    code = "import sys\nsys.setrecursionlimit(10 ** 9)\nf = lambda n: [n].__class__(map(f, [n + 1]))\nf(0)"
    result = cage.run(code)
    assert not result["success"] and result["stderr"]
    assert cage.run("def fact(n): return 1 if n < 2 else n * fact(n - 1)\nprint(fact(5))")["stdout"] == "120\n"


def test_binary_output_and_invalid_unicode_come_back_as_text(cage):
    code = "import os, sys\nos.write(1, bytes(range(256)))\nprint('\\ud800', '\\0', flush=True)\nos.write(2, b'\\xff')"
    result = cage.run(code)
    assert result["success"] and "�" in result["stdout"] and "\\ud800" in result["stdout"]
    assert "�" in result["stderr"]
    for text in ("print('\ud800')", "x = '\0'", "\udcff = 1", "print('é🌧')"):
        assert isinstance(cage.run(text)["stderr"], str)


def test_markers_of_any_protocol_are_just_printed(cage):
    result = cage.run("print('---END---')\nprint('{\"returncode\": 0}')\nraise ValueError('bad')")
    assert not result["success"] and result["stdout"].startswith("---END---\n{")


def test_answers_forged_on_the_channel_deceive_no_other_call(cage):
    code = """
import os
for number in range(3, 30):
    try: os.write(number, b'\\xff' * 100)
    except OSError: pass
"""
    assert not cage.run(code)["success"]
    assert cage.run("print('on')")["stdout"] == "on\n"


def test_closed_and_replaced_outputs_are_restored(cage):
    cage.run("import sys, os\nsys.stdout.close()\nsys.stderr = None")
    assert cage.run("print('back')")["stdout"] == "back\n"
    cage.run("import os\nos.close(1); os.close(2)")
    assert cage.run("print('again')")["stdout"] == "again\n"


def test_calls_run_in_parallel_and_those_of_a_session_in_order(cage):
    code = "import time; print(time.monotonic()); time.sleep({}); print(time.monotonic())"

    def attempt(seconds):
        with ThreadPoolExecutor(6) as threads:
            calls = [threads.submit(cage.run, code.format(seconds), f"chat-{n}") for n in range(6)]
        begun, ended = zip(*[map(float, call.result()["stdout"].split()) for call in calls], strict=True)
        return max(begun) < min(ended) or None

    assert patient(attempt)
    assert cage.service.num_sessions >= 6
    for n in range(6):
        cage.service.release(f"chat-{n}")
    cage.service.execute("1")
    assert cage.service.num_sessions <= 1
