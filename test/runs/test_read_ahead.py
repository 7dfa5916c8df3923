"""Items drawn by a thread: taken when they are there, or waited for; errors arrive, and an end is an end."""

from __future__ import annotations

import itertools
import threading

import pytest

from llmrl.runs.read_ahead import ReadAhead


def test_what_is_not_there_yet_is_only_waited_for_when_asked():
    gate = threading.Event()

    def items():
        yield 1
        gate.wait()
        yield 2

    ahead = ReadAhead(items())
    assert ahead.take(wait=True) == 1
    assert ahead.take(wait=False) is None and not ahead.is_at_end
    gate.set()
    assert ahead.take(wait=True) == 2
    assert ahead.take(wait=True) is None and ahead.is_at_end
    assert ahead.take(wait=True) is None


def test_it_draws_no_further_than_one_beyond_the_one_that_waits():
    drawn = []
    ahead = ReadAhead(drawn.append(number) or number for number in itertools.count())
    assert [ahead.take(wait=True) for _ in range(3)] == [0, 1, 2]
    ahead.close()
    ahead._thread.join(240)
    assert not ahead._thread.is_alive() and len(drawn) <= 5


def test_an_error_arrives_once_and_is_the_end():
    def items():
        yield 1
        raise ValueError("broken")

    ahead = ReadAhead(items())
    assert ahead.take(wait=True) == 1
    with pytest.raises(ValueError, match="broken"):
        ahead.take(wait=True)
    assert ahead.is_at_end and ahead.take(wait=True) is None
