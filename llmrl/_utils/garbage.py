"""Less frequent garbage collection while conversations are in flight."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

NUM_OBJECTS = 50_000
"""Number of new objects between two collections; Python's default is 700."""

_lock = threading.RLock()  # reentrant, because a collection may finalize an owner
_num_owners = 0
_before: tuple[int, int, int] = gc.get_threshold()


def search_rarely(owner: object) -> Callable[[], None]:
    """Collect garbage rarely while `owner` lives, or until the returned function is called.

    With Python's threshold, the short-lived objects of turns trigger full collections over the half million objects of
    torch. A threshold that the program has set higher, or to 0 (disabled), is kept.
    """
    global _num_owners, _before
    with _lock:
        _num_owners += 1
        if _num_owners == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < NUM_OBJECTS:
                gc.set_threshold(NUM_OBJECTS, *_before[1:])
    return weakref.finalize(owner, _end)


def search_young() -> None:
    """Free recent unreachable objects, such as a step's tensors in reference cycles."""
    if gc.isenabled():
        gc.collect(1)


def _end() -> None:
    global _num_owners
    with _lock:
        _num_owners -= 1
        if not _num_owners and gc.get_threshold() == (NUM_OBJECTS, *_before[1:]):
            gc.set_threshold(*_before)
