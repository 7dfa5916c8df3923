"""A seccomp filter of the system calls of a confined interpreter, at all levels. Standard library only.

Resource limits, Landlock and namespaces confine files, processes and addresses. They do not cover
other kinds of sockets, shared memory, locks and queues, or rarely used parts of the kernel with
many vulnerabilities. The filter therefore permanently allows only the calls that Python, its
libraries and the system's small programs need. See `man 2 seccomp`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import struct

# Number of a call on x86-64 and aarch64; None if it does not exist.
_Numbers = tuple[int | None, int | None]
_ALLOWED: dict[str, _Numbers] = {
    # Open files.
    "read": (0, 63), "write": (1, 64), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "preadv": (295, 69), "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287),
    "lseek": (8, 62), "sendfile": (40, 71), "copy_file_range": (326, 285), "close": (3, 57),
    "close_range": (436, 436), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None),
    "pipe2": (293, 59), "ftruncate": (77, 46), "fallocate": (285, 47), "fadvise64": (221, 223), "fsync": (74, 82),
    "fdatasync": (75, 83),
    # Files by name; the level restricts which.
    "creat": (85, None), "stat": (4, None), "lstat": (6, None), "fstat": (5, 80), "newfstatat": (262, 79),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getdents": (78, None),
    "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "unlink": (87, None), "unlinkat": (263, 35),
    "mknod": (133, None), "mknodat": (259, 33),
    # Own memory.
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "msync": (26, 227),
    "madvise": (28, 233), "brk": (12, 214),
    # Own processes and threads.
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "exit": (60, 93),
    "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "futex": (202, 98), "arch_prctl": (158, None),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "restart_syscall": (219, 128), "setpgid": (109, 154), "setsid": (112, 157),
    # They can set only its current user: programs such as make call them before starting others.
    "setresuid": (117, 147), "setresgid": (119, 149),
    # Information about itself.
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgid": (121, 155), "getpgrp": (111, None),
    "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158), "capget": (125, 90),
    "getrlimit": (97, 163), "getrusage": (98, 165), "times": (100, 153), "sysinfo": (99, 179), "uname": (63, 160),
    "getcpu": (309, 168), "getpriority": (140, 141), "sched_yield": (24, 124), "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121), "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126), "sched_rr_get_interval": (148, 127), "getrandom": (318, 278),
    # Time. The number of timers is limited by that of pending signals.
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "time": (201, None), "alarm": (37, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108),
    "timer_getoverrun": (225, 109), "timer_delete": (226, 111),
    # Waiting, and sockets that were inherited or created in pairs.
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "sendto": (44, 206), "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212),
    "shutdown": (48, 210), "getsockname": (51, 204), "getpeername": (52, 205), "getsockopt": (55, 209),
}  # fmt: skip
# Modes, owners and times of files, which Landlock does not restrict. Only for a process with its
# own user or without access to other files, since all files of its user would be affected.
_ALLOWED_TO_OWN_USERS: dict[str, _Numbers] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88),
}  # fmt: skip
# Truncates a file by name, which Landlock restricts from version 3.
_TRUNCATE: _Numbers = (76, 45)
_FIRST_NEW = 424
"""Later calls have the same number on all architectures, and libraries work without them (Linux 5.1 and later)."""

# Allowed arguments: no owners of signals, no leases and no larger pipes; of locks only record locks, for databases.
_FCNTL_COMMANDS = (
    fcntl.F_DUPFD, fcntl.F_GETFD, fcntl.F_SETFD, fcntl.F_GETFL, fcntl.F_SETFL, fcntl.F_GETLK, fcntl.F_SETLK,
    fcntl.F_SETLKW, fcntl.F_DUPFD_CLOEXEC, 1032,  # F_GETPIPE_SZ
)  # fmt: skip
# TCGETS, TIOCGPGRP, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_IOCTL_REQUESTS = (0x5401, 0x540F, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# PR_SET_PDEATHSIG and PR_GET_PDEATHSIG, PR_GET_DUMPABLE and PR_SET_DUMPABLE, PR_SET_NAME and
# PR_GET_NAME, PR_GET_SECCOMP, PR_CAPBSET_READ, PR_SET_NO_NEW_PRIVS and PR_GET_NO_NEW_PRIVS.
_PRCTL_OPTIONS = (1, 2, 3, 4, 15, 16, 21, 23, 38, 39)
# O_RDONLY and access mode 3 (neither reading nor writing), each with O_TRUNC, and the latter alone:
# Landlock requires no write permission for these.
_OPEN_MASK = os.O_TRUNC | os.O_ACCMODE
_OPENS_REFUSED = (os.O_TRUNC, os.O_TRUNC | os.O_ACCMODE, os.O_ACCMODE)
_UNIX = 1
_STREAM = 1
_KIND_OF_SOCKET = 0xF
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME.
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x80

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32_BIT = 0x40000000

# Classic BPF. Offsets are those of `struct seccomp_data`: number of the call, architecture, arguments.
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_AND = 0x54
_RETURN = 0x06
_NUMBER = 0
_ARCHITECTURE = 4
_ARGUMENTS = (16, 24, 32)
"""Offsets of the first three arguments: of the half of each that the kernel uses for an `int`."""
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_REFUSE = 0x00050000
_PR_SET_SECCOMP = 22
_FILTER = 2

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, if false, operand."""

_allow: Instruction = (_RETURN, 0, 0, _ALLOW)


def _refuse(number: int) -> Instruction:
    return (_RETURN, 0, 0, _REFUSE | number)


def _one_of(argument: int, values: tuple[int, ...], refusal: int = errno.EPERM) -> list[Instruction]:
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS[argument])]
    for value in values:
        program += [(_EQUAL, 0, 1, value), _allow]
    return [*program, _refuse(refusal)]


def _none_of(argument: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS[argument]), (_AND, 0, 0, mask)]
    for value in values:
        program += [(_EQUAL, 0, 1, value), _refuse(errno.EPERM)]
    return [*program, _allow]


# Calls that are allowed with some arguments: their numbers and checks. Every list ends in a return.
_BY_ARGUMENTS: dict[str, tuple[_Numbers, list[Instruction]]] = {
    "open": ((2, None), _none_of(1, _OPENS_REFUSED, _OPEN_MASK)),
    "openat": ((257, 56), _none_of(2, _OPENS_REFUSED, _OPEN_MASK)),
    "clone": (
        (56, 220),
        [(_LOAD, 0, 0, _ARGUMENTS[0]), (_ANY_BIT, 0, 1, _NEW_NAMESPACES), _refuse(errno.EPERM), _allow],
    ),
    # Datagram sockets of a pair can be connected to other sockets.
    "socketpair": (
        (53, 199),
        [
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_EQUAL, 1, 0, _UNIX),
            _refuse(errno.EPERM),
            (_LOAD, 0, 0, _ARGUMENTS[1]),
            (_AND, 0, 0, _KIND_OF_SOCKET),
            (_EQUAL, 0, 1, _STREAM),
            _allow,
            _refuse(errno.EPERM),
        ],
    ),
    "prctl": ((157, 167), _one_of(0, _PRCTL_OPTIONS)),
    "fcntl": ((72, 25), _one_of(1, _FCNTL_COMMANDS)),
    "ioctl": ((16, 29), _one_of(1, _IOCTL_REQUESTS, errno.ENOTTY)),
    # With a core limit of 0, a crash would start the machine's core-file handler.
    "setrlimit": ((160, 164), _none_of(0, (resource.RLIMIT_CORE,))),
    # Only for the calling process, and without changing the core limit.
    "prlimit64": (
        (302, 261),
        [
            (_LOAD, 0, 0, _ARGUMENTS[0]),
            (_EQUAL, 1, 0, 0),
            _refuse(errno.EPERM),
            (_LOAD, 0, 0, _ARGUMENTS[1]),
            (_EQUAL, 1, 0, resource.RLIMIT_CORE),
            _allow,
            # Reading is allowed: both halves of the pointer to a new limit are zero.
            (_LOAD, 0, 0, _ARGUMENTS[2]),
            (_EQUAL, 1, 0, 0),
            _refuse(errno.EPERM),
            (_LOAD, 0, 0, _ARGUMENTS[2] + 4),
            (_EQUAL, 0, 1, 0),
            _allow,
            _refuse(errno.EPERM),
        ],
    ),
    "sched_setaffinity": ((203, 122), _one_of(0, (0,))),
    # Locks of readable files could block other programs; libraries work if the call does not exist.
    "flock": ((73, 32), [_refuse(errno.ENOSYS)]),
}


def filter_program(
    machine: str, *, is_user_shared: bool = False, is_truncation_open: bool = False
) -> list[Instruction]:
    """Return the filter for an architecture.

    Args:
        machine: architecture, as in `os.uname`.
        is_user_shared: whether only Landlock protects other files of the interpreter's user.
        is_truncation_open: whether Landlock is used in a version that does not restrict truncation.

    Raises OSError if the architecture is unknown.
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}, only for {', '.join(_ARCHITECTURES)}")
    architecture, column = _ARCHITECTURES[machine]
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # the other word size, where numbers have other meanings
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), _refuse(errno.EPERM)]
    allowed = [*_ALLOWED.values()]
    if not is_user_shared:
        allowed += _ALLOWED_TO_OWN_USERS.values()
    if not is_truncation_open:
        allowed.append(_TRUNCATE)
    for numbers in allowed:
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), _allow]
    for numbers, instructions in _BY_ARGUMENTS.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, len(instructions), number), *instructions]
    return [*program, (_AT_LEAST, 0, 1, _FIRST_NEW), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]


def filter_system_calls(*, is_user_shared: bool, is_truncation_open: bool) -> None:
    """Permanently restrict this process and its descendants to the system calls that `filter_program` allows.

    Requires `forbid_new_privileges`. The arguments are those of `filter_program`.

    Raises OSError if the kernel does not support filters, or the architecture is unknown.
    """
    program = filter_program(os.uname().machine, is_user_shared=is_user_shared, is_truncation_open=is_truncation_open)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    argument = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(argument), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
