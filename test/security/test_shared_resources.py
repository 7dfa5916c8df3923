"""What interpreters share with the machine: code can take none of it, or a bounded part."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from cages import Cage, IsolationError, attempts

from llmrl.sandbox.system_calls import filter_program

SHARED = """
is_arm = os.uname().machine == 'aarch64'
def call(x86, arm, *arguments): return libc.syscall(arm if is_arm else x86, *arguments)
buffer = ctypes.create_string_buffer(4096)
attempt('asynchronous input and output', lambda: call(206, 0, 128, buffer))
attempt('inotify', lambda: call(294, 26, 0))
attempt('fanotify', lambda: call(300, 262, 0, 0))
attempt('locked memory', lambda: call(149, 228, ctypes.addressof(buffer), 4096))
attempt('all locked', lambda: call(151, 230, 1))
attempt('write all disks', lambda: call(162, 81))
attempt('signalfd', lambda: call(289, 74, -1, bytes(8), 8, 0))
attempt('timerfd', lambda: call(283, 85, 1, 0))
attempt('pidfd', lambda: call(434, 434, os.getpid(), 0))
attempt('key of memory', lambda: call(330, 289, 0, 0))
attempt('policy of memory', lambda: call(238, 237, 0, 0, 0))
attempt('page cache', lambda: call(27, 232, ctypes.addressof(buffer) & ~4095, 4096, bytes(2)))
attempt('membarrier', lambda: call(324, 283, 0, 0, 0))
attempt('seccomp', lambda: call(317, 277, 2, 0, buffer))
attempt('landlock', lambda: call(444, 444, 0, 0, 1))
attempt('queue of messages', lambda: call(240, 180, b'x', 0o102, 0o600, None))
attempt('openat2', lambda: call(437, 437, -100, b'.', bytes(24), 24))
attempt('queued signal', lambda: call(129, 138, os.getpid(), 0, bytes(128)))
attempt('another user', lambda: call(105, 146, os.getuid()))
attempt('splice', lambda: call(275, 76, 0, 0, 1, 0, 1, 0))
attempt('vmsplice', lambda: call(278, 75, 1, 0, 0, 0))
attempt('tee', lambda: call(276, 77, 0, 1, 1, 0))
for kind in range(2, 46):
    attempt(f'pair {kind}', lambda: libc.socketpair(kind, 1, 0, buffer))
shared = open(os.__file__)
attempt('lock of a shared file', lambda: fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt('lease', lambda: fcntl.fcntl(shared, fcntl.F_SETLEASE, fcntl.F_RDLCK))
attempt('notice', lambda: fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 1))
attempt('lock of an open file', lambda: fcntl.fcntl(shared, 37, bytes(32)))
attempt('signal of an owner', lambda: fcntl.fcntl(shared, 10, 9))
attempt('owner', lambda: fcntl.fcntl(shared, fcntl.F_SETOWN, os.getpid()))
attempt('hint of life', lambda: fcntl.fcntl(shared, 1036, bytes(8)))
reading, writing = os.pipe()
attempt('large pipe', lambda: fcntl.fcntl(reading, 1031, 1 << 20))
for request in (0x40086602, 0x401c5820, 0x5412, 0x541c, 0x540e, 0x8901, 0x5452, 0xc0045877, 0xc020660b):
    attempt(f'ioctl {request:x}', lambda: libc.ioctl(shared.fileno(), request, buffer))
open('mine', 'w').close()
attempt('attribute', lambda: os.setxattr('mine', 'user.a', b'b'))
attempt('attribute of an open file', lambda: os.setxattr(os.open('mine', os.O_RDWR), 'user.a', b'b'))
attempt('attribute of a link', lambda: os.setxattr('mine', 'user.a', b'b', follow_symlinks=False))
for option in (0, 7, 8, 10, 14, 22, 24, 28, 29, 33, 35, 36, 41, 43, 47, 52, 53, 62, 65, 67, 0x59616d61):
    attempt(f'prctl {option}', lambda: libc.prctl(option, 1, 0, 0, 0))
attempt('core files', lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
attempt('core files', lambda: resource.prlimit(0, resource.RLIMIT_CORE, (0, 0)))
attempt('core files', lambda: call(160, 164, 4, bytes(16)))
attempt('limits of another', lambda: resource.prlimit(os.getppid() or 1, resource.RLIMIT_NOFILE))
attempt('processors of another', lambda: os.sched_setaffinity(os.getppid() or 1, {0}))
attempt('reader that cuts', lambda: os.open('mine', os.O_RDONLY | os.O_TRUNC))
attempt('neither reader nor writer', lambda: os.open('mine', 3))
"""


@pytest.mark.usefixtures("own_programs")
def test_what_the_machine_has_one_of_is_refused(cage, num_checks):
    attempts(cage, num_checks, SHARED)


@pytest.mark.usefixtures("own_programs")
def test_timers_and_signals_that_wait_are_bounded(cage):
    code = """
import ctypes
libc, made, timer = ctypes.CDLL(None), 0, ctypes.c_void_p()
while made < 5000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: made += 1
print(made)
"""
    assert int(cage.lines(code)[0]) <= 256


@pytest.mark.usefixtures("own_programs")
def test_a_crash_starts_no_program_that_takes_core_files(cage):
    # The kernel gives up where the limit is one byte; with zero it starts the program.
    assert cage.lines("import resource; print(*resource.getrlimit(resource.RLIMIT_CORE))") == ["1 1"]


# Each process starts the next and ends: a list of processes shows the last one too late.
RELAY = """
import os
if not os.fork():
    while True:
        try:
            if os.fork(): os._exit(0)
            {first}
        except OSError: pass
"""


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("first", ["pass", "os.setsid()"])
def test_processes_that_start_one_another_are_ended(cage, first):
    for _ in range(5):
        assert "left running were ended" in cage.run(RELAY.format(first=first))["stderr"]
        assert cage.run("import time; time.sleep(0.05)")["stderr"] == ""


@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize("version", [1, 2])
def test_no_file_outside_is_cut_where_landlock_does_not_know_it(version):
    try:
        cage = Cage("ordinary", "process", landlock=version)
    except IsolationError as error:
        pytest.skip(str(error))
    paths = [cage.folder / "secret", cage.folder / "venv/pyvenv.cfg"]
    before = [path.read_bytes() for path in paths]
    code = f"for path in {[str(path) for path in paths]}:\n"
    code += """
    attempt('truncate ' + path, lambda: os.truncate(path, 0))
    for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, 3):
        attempt(f'open {flags} {path}', lambda: os.open(path, flags | os.O_TRUNC))
    attempt('creat ' + path, lambda: libc.creat(path.encode(), 0o600))
    how = (0o1000).to_bytes(8, 'little') + bytes(16)
    attempt('openat2 ' + path, lambda: libc.syscall(437, -100, path.encode(), how, 24))
"""
    try:
        attempts(cage, [0], code)
        code = "open('a', 'w').write('12345')\nwith open('a', 'r+') as f: f.truncate(2)\nprint(open('a').read())"
        assert cage.lines(code) == ["12"]
        assert [path.read_bytes() for path in paths] == before
    finally:
        cage.close()


def decision(program, number, architecture):
    """What a filter says of a call without arguments, by the rules of classic BPF."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *[0] * 6)
    held, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, operand)
        elif code == 0x54:
            held &= operand
        else:
            is_so = {0x15: held == operand, 0x35: held >= operand, 0x45: bool(held & operand)}[code]
            place += if_true if is_so else if_false


def names_of(header):
    """The calls of an architecture by number, out of the kernel's header."""
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", Path(header).read_text())
    names = {int(number): name for name, number in reversed(found)}
    return {number: {"fstatat": "newfstatat"}.get(name, name) for number, name in names.items()}


# Those that modern calls have taken the place of: there is no number for them on aarch64.
ELDER = {
    "access", "alarm", "arch_prctl", "chmod", "chown", "creat", "dup2", "epoll_create", "epoll_wait", "fork",
    "futimesat", "getdents", "getpgrp", "lchown", "link", "lstat", "mkdir", "mknod", "open", "pause", "pipe", "poll",
    "readlink", "rename", "rmdir", "select", "stat", "symlink", "time", "unlink", "utime", "utimes", "vfork",
}  # fmt: skip


def test_both_architectures_allow_the_same_calls():
    x86, arm = (
        {
            name
            for number, name in names_of(header).items()
            if decision(filter_program(machine), number, architecture) == 0x7FFF0000
        }
        for machine, architecture, header in (
            ("x86_64", 0xC000003E, "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
            ("aarch64", 0xC00000B7, "/usr/include/asm-generic/unistd.h"),
        )
    )
    assert x86 - arm == ELDER and arm - x86 == set()
    assert 150 < len(x86) < 190


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_a_filter_decides_every_call_within_its_instructions(machine, architecture):
    for is_shared in (False, True):
        program = filter_program(machine, is_user_shared=is_shared, is_truncation_open=is_shared)
        assert len(program) < 4096 and all(jump < 256 for _, *jumps, _ in program for jump in jumps)
        said = {decision(program, number, architecture) for number in range(1024)}
        assert said == {0x7FFF0000, 0x50001, 0x50019, 0x50026}  # allow, EPERM, ENOTTY, ENOSYS
    assert decision(program, 39, 0x40000003) == 0x80000000  # of the other word size: ends the process
