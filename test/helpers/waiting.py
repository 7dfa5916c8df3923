"""What tests of things that happen elsewhere share: waiting for them, and whether a process is there."""

from __future__ import annotations

import time
from pathlib import Path


def wait_until(condition, timeout_s=240.0):
    """Return once `condition()` holds; fail when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it never came true in {timeout_s:g} s"
        time.sleep(0.01)


def is_running(pid):
    """Whether there is such a process, and it has not ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
