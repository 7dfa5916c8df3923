"""Safe reading and writing of files: writes are atomic, and links are not followed.

A folder of unknown origin may contain links to private files, pipes that block, or devices.
`open_file` and the writing functions accept only regular files.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Collection
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

_FLAGS = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
_NO_LINKS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


class UnsafeFileError(ValueError):
    """A path expected to be a file or a folder is a link, a pipe, a socket or a device."""

    def __init__(self, path: Path, expected: str = "a file") -> None:
        try:
            found = _KINDS[stat.S_IFMT(path.lstat().st_mode)]
            found += f" to {path.readlink()}" if path.is_symlink() else ""
        except OSError:
            found = "nothing that can be opened"
        super().__init__(
            f"{path} must be {expected}, and is {found}, which may give access to data outside the folder. "
            f"Remove it, or put {expected} in its place."
        )


def open_file(path: Path, mode: str = "r", *, newline: str | None = None, errors: str | None = None) -> IO[Any]:
    """Open a regular file in UTF-8, without following a link or blocking.

    Args:
        path: path of the file. Links among its parent folders are followed (see `check_entries`).
        mode: `r`, `r+`, `w`, `a` or `a+`, with `b` for bytes.

    Raises:
        UnsafeFileError: if the path is not a regular file.
        FileNotFoundError: if there is no file to read.
        ValueError: if text to read is larger than this machine's memory (a sparse file takes little space on disk).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "note")
        >>> path.symlink_to("/etc/hostname")
        >>> open_file(path)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        llmrl._utils.files.UnsafeFileError: ... must be a file, and is a link to /etc/hostname, ...
    """
    flags = _FLAGS[mode.replace("b", "")]
    try:
        # Truncate only after the check that the path is a regular file.
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | _NO_LINKS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENODEV, errno.EOPNOTSUPP):
            raise UnsafeFileError(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UnsafeFileError(path)
        if mode == "r":
            check_fits_memory(path, os.fstat(descriptor).st_size)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    if "b" in mode:
        return os.fdopen(descriptor, mode)
    return os.fdopen(descriptor, mode, encoding="utf-8", newline=newline, errors=errors)


def check_fits_memory(path: Path, num_bytes: int) -> None:
    """Raise ValueError if reading a file takes more bytes than this machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > memory:
        raise ValueError(
            f"{path} takes {num_bytes / 1e9:.0f} GB to read, and this machine has {memory / 1e9:.0f} GB of memory: the "
            "file is damaged, or must be read on a machine with more memory"
        )


def read_text(path: Path, *, newline: str | None = None, errors: str | None = None) -> str:
    """Return the content of a text file, opened by `open_file`."""
    with open_file(path, newline=newline, errors=errors) as file:
        return str(file.read())


def check_entries(folder: Path, names: Collection[str], *, links: Collection[str] = ()) -> None:
    """Raise UnsafeFileError if an entry of a folder, or anything below it, is neither a file nor a folder.

    Call it before other libraries, which follow links, open files in the folder.

    Args:
        names: patterns of the entries to check (`fnmatch`).
        links: patterns of paths that may be links, such as `wandb/latest-run`.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if not any(fnmatch(entry.name, name) for name in names):
                continue
            parted = [link.partition("/") for link in links]
            below = [rest for first, _, rest in parted if fnmatch(entry.name, first)]
            if entry.is_dir(follow_symlinks=False):
                check_entries(Path(entry.path), ["*"], links=below)
            elif not entry.is_file(follow_symlinks=False) and not (entry.is_symlink() and "" in below):
                raise UnsafeFileError(Path(entry.path), "a file or a folder")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file atomically: call `write(temporary_path)`, flush to disk, then rename.

    If `write` raises, nothing changes. `clean_killed_writes` removes the temporary file of a killed process.
    """
    temporary = _temporary(path)
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS, 0o666))
    try:
        write(temporary)
        flush_to_disk(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def _temporary(path: Path) -> Path:
    """Return a temporary path in the same folder, with an unpredictable name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder atomically: call `write(temporary_path)`, flush to disk, then rename.

    If `write` raises, nothing changes. `clean_killed_writes` restores the old folder after a kill.
    """
    temporary = _temporary(path)
    old = path.with_name(f".{path.name}.old")
    if os.path.lexists(old):
        _put_back(old, path)
    try:
        temporary.mkdir()
        write(temporary)
        for inner in [*temporary.rglob("*"), temporary]:
            flush_to_disk(inner)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if os.path.lexists(path):
        path.rename(old)
    temporary.rename(path)
    flush_to_disk(path.parent)
    if os.path.lexists(old):
        remove(old)


def clean_killed_writes(folder: Path) -> None:
    """Remove temporary entries of killed processes from a folder, and restore entries that they had renamed."""
    for old in folder.glob(".*.old"):
        _put_back(old, old.with_name(old.name[1:].removesuffix(".old")))
    for left in folder.glob(".*.tmp"):
        remove(left)


def _put_back(old: Path, path: Path) -> None:
    if os.path.lexists(path):
        remove(old)
    else:
        old.rename(path)


def remove(path: Path) -> None:
    """Remove a file, a folder with its content, or a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Flush the content of a file, or the names in a folder, to disk, so that a later rename cannot overtake it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_lines(path: Path, is_kept: Callable[[bytes], bool] = lambda line: True) -> None:
    r"""Remove an incomplete last line, and then trailing lines until `is_kept` is true for one.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "log")
        >>> _ = path.write_bytes(b"one\ntwo\nthr")
        >>> cut_lines(path, lambda line: line != b"two\n")
        >>> path.read_bytes()
        b'one\n'
    """
    if not os.path.lexists(path):
        return
    with open_file(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                if is_kept(data[start:end]):
                    break
                end = start
        if end < size:
            file.truncate(end)
