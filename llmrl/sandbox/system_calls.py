"""A filter of system calls: what a confined interpreter cannot ask of the kernel at any level. Standard library only.

Resource limits, Landlock and namespaces confine files, processes and addresses. They leave open what is none of these:
sockets of kinds that Landlock does not know, memory that belongs to no process, queues and keyrings that interpreters
would share, and the parts of the kernel with the longest lists of faults. The filter refuses those calls (`EPERM`), for
good and for all descendants. See `man 2 seccomp`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

# Number of a call on x86-64 and aarch64; None where it does not exist.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # The network and other programs' sockets. What is inherited, and pairs of streams, stay usable.
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242),
    # Memory, queues and keys that belong to no process, or to all of one user's.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193), "semctl": (66, 191), "semtimedop": (220, 192),
    "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "mq_open": (240, 180),
    "mq_unlink": (241, 181), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Ways around a filter, and parts of the kernel that code in need of arithmetic does not need.
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "fanotify_init": (300, 262), "personality": (135, 92),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "lookup_dcookie": (212, 18),
    "kcmp": (312, 272), "quotactl": (179, 60), "quotactl_fd": (443, 443), "acct": (163, 89), "syslog": (103, 116),
    # Other processes.
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "inotify_add_watch": (254, 27),
    # Namespaces, mounts and other roots.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "swapon": (167, 224), "swapoff": (168, 225),
    # The machine.
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58),
}  # fmt: skip
# Modes, owners, times and attributes of files, which Landlock does not know: refused to whoever is no user of its own,
# since all files of its user would be within reach.
_REFUSED_TO_SHARED_USERS: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
# Of other processes than the caller: limits and processors.
_OF_ITSELF_ALONE = ((302, 261), (203, 122))
_FIRST_UNKNOWN = 470
"""Calls from here on are newer than this table."""
# Calls of which some arguments are refused, and the one that is said not to exist, so that libraries take its elder.
_SOCKETPAIR, _CLONE, _CLONE3 = (53, 199), (56, 220), (435, 435)
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_X32_BIT = 0x40000000
_STREAM, _KIND_OF_SOCKET = 1, 0xF
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and NEWTIME.
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x80

# Classic BPF. Offsets are those of `struct seccomp_data`: the call's number, the architecture, its arguments.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_SECCOMP, _FILTER = 22, 2

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if true, if false, operand."""


def filter_program(machine: str, *, is_user_shared: bool = False) -> list[Instruction]:
    """Return the filter for an architecture, as `os.uname` names it.

    Args:
        machine: the architecture.
        is_user_shared: whether files of its user that are not its own are kept from it by Landlock alone.

    Raises:
        OSError: for an architecture whose call numbers are not known.

    Example:
        >>> len(filter_program("x86_64")) > len(filter_program("aarch64")) > 100
        True
    """
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {machine}, only for {', '.join(_ARCHITECTURES)}")
    architecture, column = _ARCHITECTURES[machine]
    refuse: Instruction = (_RETURN, 0, 0, _REFUSE | errno.EPERM)
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),  # the other word size, whose numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32_BIT), refuse]
    unknown: Instruction = (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)
    for numbers in (*_REFUSED.values(), *(_REFUSED_TO_SHARED_USERS.values() if is_user_shared else ())):
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), refuse]
    program += [(_EQUAL, 0, 1, _CLONE3[column]), unknown, (_AT_LEAST, 0, 1, _FIRST_UNKNOWN), unknown]
    for both in _OF_ITSELF_ALONE:
        program += [(_EQUAL, 0, 4, both[column]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 1, 0, 0), refuse, allow]
    program += [
        (_EQUAL, 0, 4, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        refuse,
        allow,
    ]
    # A pair of datagram sockets can be pointed at anybody's.
    program += [
        (_EQUAL, 0, 4, _SOCKETPAIR[column]),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_AND, 0, 0, _KIND_OF_SOCKET),
        (_EQUAL, 1, 0, _STREAM),
        refuse,
    ]
    return [*program, allow]


def filter_system_calls(*, is_user_shared: bool) -> None:
    """Refuse the calls above to this process and all that come from it, for good.

    Needs `forbid_new_privileges`. The argument is that of `filter_program`.

    Raises:
        OSError: where the kernel has no filters, or the architecture is not known.
    """
    program = filter_program(os.uname().machine, is_user_shared=is_user_shared)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    argument = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(argument), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
