"""Kernel calls for confinement that Python does not wrap. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

NEW_MOUNTS = 0x00020000
NEW_HOST_NAME = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PIDS = 0x20000000
NEW_NETWORK = 0x40000000

BOX = "/box"
"""The interpreter's folder in its own file system; `/tmp` links to it, unless Python is installed in `/tmp`."""

RESERVED = (BOX, "/dev", "/proc", "/tmp")
"""Top-level folders that every file system of an interpreter has."""

_MS_READ_ONLY = 0x1
_MS_NOSUID = 0x2
_MS_NODEV = 0x4
_MS_BIND = 0x1000
_MS_REC = 0x4000
_MS_PRIVATE = 0x40000
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_AT_FDCWD = -100
_ATTR_READ_ONLY = 0x1
_MOUNT_SETATTR = 442
_LANDLOCK_CREATE = 444
_LANDLOCK_ADD = 445
_LANDLOCK_RESTRICT = 446
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_KEEPCAPS = 8
_PR_CAPBSET_DROP = 24
_PR_SET_SUBREAPER = 36
_PR_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_CAP_VERSION_3 = 0x20080522
READ_EVERYTHING = 2
"""The capability CAP_DAC_READ_SEARCH."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Enter new namespaces; raise OSError if the kernel refuses."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call `mount(2)`; raise OSError if the kernel refuses."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    data = None if options is None else options.encode()
    _check(_libc.mount(*words, ctypes.c_ulong(flags), data), f"mount on {target}")


def mount_private_tmp(target: str, num_bytes: int, owner: int) -> None:
    """Mount an empty in-memory file system of a limited size, owned by one user."""
    # The number of files has a limit, too: an empty file takes a kilobyte of kernel memory.
    options = f"size={num_bytes},nr_inodes={max(1024, num_bytes >> 12)},mode=700,uid={owner},gid={owner}"
    mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)


def mount_own_proc() -> None:
    """Mount `/proc` of this namespace, read-only, or an empty folder if the kernel refuses."""
    try:
        mount("proc", "/proc", "proc", _MS_READ_ONLY | _MS_NOSUID | _MS_NODEV)
    except OSError:
        mount("tmpfs", "/proc", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=4k,mode=555")


def set_parent_death_signal(number: int) -> None:
    """Let the kernel send this process a signal when its parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl")


def be_killed_first() -> None:
    """Let the kernel kill this process and its descendants first when memory runs out."""
    # The limit on memory applies to each process, not to the sum. Writing to `/proc` can undo this.
    with contextlib.suppress(OSError):  # without /proc
        Path("/proc/self/oom_score_adj").write_text("1000")


def hide_memory() -> None:
    """Protect this process's memory from other processes of its user."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def become_reaper() -> None:
    """Become the parent of orphaned descendants."""
    _check(_libc.prctl(_PR_SET_SUBREAPER, 1, 0, 0, 0), "prctl")


def forbid_new_privileges() -> None:
    """Prevent programs from gaining privileges by file attributes, such as setuid, from now on."""
    _check(_libc.prctl(_PR_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def become_user(number: int, *, keep: int | None = None) -> None:
    """Change permanently from root to an unprivileged user; one capability may be kept."""
    _check(_libc.prctl(_PR_SET_KEEPCAPS, int(keep is not None), 0, 0, 0), "prctl")
    os.setgroups([])
    os.setresgid(number, number, number)
    os.setresuid(number, number, number)
    drop_capabilities(keep=keep)


def drop_capabilities(*, keep: int | None = None) -> None:
    """Drop all capabilities permanently, except at most one, which child programs inherit."""
    for number in range(64):
        if number != keep:
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)  # fails without it, and beyond the last one
    mask = 0 if keep is None else 1 << keep
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    low = mask & 0xFFFFFFFF
    high = mask >> 32
    _check(_libc.capset(header, struct.pack("6I", low, low, low, high, high, high)), "capset")
    if keep is not None:
        _check(_libc.prctl(_PR_CAP_AMBIENT, 2, keep, 0, 0), "prctl")


def map_to_root(user: int, group: int) -> None:
    """Become root in a new user namespace without other users."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Return whether `path` is one of `folders` or below one.

    Example:
        >>> is_below("/usr/lib", ["/usr"]), is_below("/usr", ["/usr"]), is_below("/usr2", ["/usr"])
        (True, True, False)
    """
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def change_root(new_root: str, readable: Iterable[str], links: Iterable[str] = ()) -> None:
    """Change to a file system that has only `readable` (read-only), some devices, empty folders and links.

    Requires a new mount namespace. Raises OSError if the kernel refuses.
    """
    os.umask(0o022)
    mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    mount("tmpfs", new_root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    bound: list[str] = []
    for path in sorted(set(readable), key=len):
        if not is_below(path, bound) and _bind(path, new_root):
            bound.append(path)
    for name in ("null", "zero", "full", "random", "urandom"):
        _bind(f"/dev/{name}", new_root)
    for name in (BOX, "/proc"):
        Path(new_root + name).mkdir()
    with contextlib.suppress(FileExistsError):
        Path(new_root, "tmp").symlink_to(BOX)
    for link in links:
        Path(new_root + link).symlink_to(BOX + link)
    # The kernel mounts a new /proc only if one is visible.
    mount("/proc", f"{new_root}/proc", None, _MS_BIND | _MS_REC)
    os.chdir(new_root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount")
    os.chdir("/")
    _make_read_only("/", is_recursive=False)


def _bind(path: str, new_root: str) -> bool:
    """Bind a file, folder or link into the new root; return whether everything below it is included."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    target = Path(new_root + path)
    with contextlib.suppress(FileExistsError):
        target.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISLNK(mode):
            target.symlink_to(Path(path).readlink())
            return False
        target.mkdir() if stat.S_ISDIR(mode) else target.touch()
    mount(path, str(target), None, _MS_BIND | _MS_REC)
    if not path.startswith("/dev/"):
        _make_read_only(str(target), is_recursive=True)
    return stat.S_ISDIR(mode)


def _make_read_only(path: str, *, is_recursive: bool) -> None:
    attributes = struct.pack("4Q", _ATTR_READ_ONLY, 0, 0, 0)
    flags = _AT_RECURSIVE if is_recursive else 0
    arguments = (_AT_FDCWD, os.fsencode(path), flags, attributes, ctypes.c_size_t(len(attributes)))
    _check(_libc.syscall(_MOUNT_SETATTR, *arguments), f"read-only {path}")


# Landlock lets an unprivileged process give up rights, numbered as in the kernel's header.
_EXECUTE = 1
_WRITE_FILE = 2
_READ_FILE = 4
_READ_DIR = 8
_TRUNCATE = 1 << 14
_IOCTL = 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
LANDLOCK_OF_TRUNCATION = 3
"""First version that restricts truncation."""
LANDLOCK_OF_SIGNALS = 6
"""First version that blocks signals to outside processes."""


def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if unavailable."""
    return max(0, _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def restrict(*, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Give up access to all other files permanently, and, if supported, TCP and signals to other processes.

    Requires `forbid_new_privileges`. Raises OSError if the kernel has no Landlock.
    """
    version = landlock_version()
    rights = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("Q", rights)
    if version >= 4:
        attributes += struct.pack("Q", 0b11)  # TCP: to bind and to connect
    if version >= LANDLOCK_OF_SIGNALS:
        attributes += struct.pack("Q", 0b11)  # scopes: abstract sockets and signals
    size = ctypes.c_size_t(len(attributes))
    ruleset = _check(_libc.syscall(_LANDLOCK_CREATE, attributes, size, 0), "landlock")
    devices = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    for paths, allowed in ((readable, _READ), (devices, _READ | _WRITE_FILE), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    _check(_libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(opened).st_mode):
        rights &= _ON_FILES
    rule = struct.pack("<Qi", rights, opened)
    _check(_libc.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock {path}")
    os.close(opened)
