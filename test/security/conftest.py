"""What attacks share: cages at every level and of every user, and the count of what was tried in them."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from cages import HOSTILE, LEVELS, USERS, Cage, IsolationError
from waiting import wait_until

_COUNTED = "confinement checks"
_counts: Counter[tuple[str, str]] = Counter()


@pytest.fixture(scope="module", params=[(user, level) for user in USERS for level in LEVELS], ids="-".join)
def shared_cage(request):
    """A cage of a user at a level, for all attacks of a file."""
    try:
        cage = Cage(*request.param)
    except IsolationError as error:
        pytest.skip(str(error))
    yield cage
    cage.close()


@pytest.fixture
def num_checks(request, shared_cage):
    """How many checks a test makes, one unless it adds to them: `num_checks[0] += 20`."""
    counted = [1]
    # The same list, so that the report of the test has what it says at its end.
    request.node.user_properties.append((_COUNTED, (shared_cage.user, shared_cage.level, counted)))
    return counted


@pytest.fixture
def cage(shared_cage, num_checks):
    """A cage, and afterwards a healthy one: it runs code, and nothing of what was started in it is left."""
    before = hostile_processes()
    yield shared_cage
    shared_cage.service.release("chat")
    assert shared_cage.run("print(6 * 7)", session="after")["stdout"] == "42\n"
    shared_cage.service.release("after")
    wait_until(lambda: not hostile_processes() - before)


def hostile_processes():
    """What attacks of this process started to be left behind."""
    found = set()
    for process in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):
            if HOSTILE.encode() in (process / "cmdline").read_bytes():
                found.add(int(process.name))
    return found


def pytest_runtest_logreport(report):
    """Count the checks of attacks that failed to do harm."""
    if report.when == "call" and report.passed:
        for name, value in report.user_properties:
            if name == _COUNTED:
                user, level, (count,) = value
                _counts[level, user] += count


def pytest_terminal_summary(terminalreporter):
    """Say how many checks passed, per level and user."""
    if not _counts:
        return
    terminalreporter.section("confinement checks passed")
    for level in LEVELS:
        counts = "  ".join(f"{user} {_counts[level, user]:5}" for user in USERS)
        terminalreporter.line(f"{level:12}{counts}")
    terminalreporter.line(f"{'all':12}{_counts.total():5}")
