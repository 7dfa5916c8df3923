"""How much memory a part of a benchmark's process takes at its peak."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def _gib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def begin_peak() -> float:
    """Return what is resident, in GiB, with what is free given back; the peak counts from here."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    floor = _gib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return floor


def read_peak() -> float:
    """Return the most that was resident since `begin_peak`, in GiB."""
    return _gib("VmHWM")
