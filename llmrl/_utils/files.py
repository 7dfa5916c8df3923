"""Writing files so that neither a kill nor a power cut leaves half of one."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that readers see the old one or the new one, never half: `write(temporary_path)`, then rename.

    The content reaches the disk before the name that leads to it. What `write` raises is raised, and nothing is left.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "note.txt")
        >>> write_atomically(path, lambda temporary: temporary.write_text("whole"))
        >>> path.read_text(), len(list(path.parent.iterdir()))
        ('whole', 1)
    """
    # One name, so that writers that were killed leave one file at most.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        write(temporary)
        flush_to_disk(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_to_disk(path.parent)


def write_folder_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write a folder so that readers see the old one or the new one, never half: `write(temporary_path)`, then rename.

    Between the two names is a moment without either; a kill in it leaves the old one to `mend_killed_writes`. What
    `write` raises is raised, and nothing is left.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "model")
        >>> for text in ("old", "new"):
        ...     write_folder_atomically(path, lambda folder: (folder / "note.txt").write_text(text))
        >>> (path / "note.txt").read_text(), len(list(path.parent.iterdir()))
        ('new', 1)
    """
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    if old.exists():
        _put_back(old, path)
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        temporary.mkdir()
        write(temporary)
        for inner in [*temporary.rglob("*"), temporary]:
            flush_to_disk(inner)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        path.rename(old)
    temporary.rename(path)
    flush_to_disk(path.parent)
    if old.exists():
        shutil.rmtree(old)


def mend_killed_writes(folder: Path) -> None:
    """Remove what killed writers left in a folder that has no writer now, and put back what they had moved away."""
    for old in folder.glob(".*.old"):
        _put_back(old, old.with_name(old.name[1:].removesuffix(".old")))
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def _put_back(old: Path, path: Path) -> None:
    if path.exists():
        shutil.rmtree(old)
    else:
        old.rename(path)


def flush_to_disk(path: str | os.PathLike[str]) -> None:
    """Return once the content of a file, or the names in a folder, are on the disk.

    A rename may otherwise reach the disk before what it names.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cut_lines(path: Path, is_kept: Callable[[bytes], bool] = lambda line: True) -> None:
    r"""Cut off the last lines of a file: half a line, which a killed writer leaves, and those that are not kept.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "log")
        >>> _ = path.write_bytes(b"one\ntwo\nthr")
        >>> cut_lines(path, lambda line: line != b"two\n")
        >>> path.read_bytes()
        b'one\n'
    """
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                if is_kept(data[start:end]):
                    break
                end = start
        if end < size:
            file.truncate(end)
