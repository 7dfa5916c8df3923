"""Every kind of ending, and nothing that grows: the short form of `python -m benchmarks soak`."""

from __future__ import annotations

import pytest

from benchmarks.soak import SCRIPTS, soak

pytestmark = pytest.mark.usefixtures("own_programs")
ERRORS = ("environment_error", "engine_error")
LIMITS = ("length", "max_turns", "prompt_too_long", "environment_truncated", "timeout")


def test_conversations_end_in_every_way_and_leave_nothing():
    num_each = 2
    (*earlier, last), endings = soak(2 * num_each * len(SCRIPTS), 3)
    for kind in SCRIPTS:
        status = "ERROR" if kind in ERRORS else "TRUNCATED" if kind in LIMITS else "COMPLETED"
        reason = kind if kind in (*ERRORS, *LIMITS) else ""
        ending = (kind, "ABORTED", "aborted") if kind == "aborted" else (kind, status, reason)
        # On a busy machine some may run out of time.
        num_late = endings[kind, "TRUNCATED", "timeout"] if kind != "timeout" else 0
        assert endings[ending] == 2 * num_each - num_late and num_late <= num_each, endings
    for name in ("descriptors", "threads", "processes", "files"):
        assert last[name] <= max(part[name] for part in earlier) + 2, (earlier, last)
