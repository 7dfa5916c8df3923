"""Measurement of the peak memory of a part of a process."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path


def _gib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**20


def begin_peak() -> float:
    """Return free memory to the system, restart the peak, and return the resident memory in GiB."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    floor = _gib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    return floor


def read_peak() -> float:
    """Return the peak of resident memory since `begin_peak`, in GiB."""
    return _gib("VmHWM")
