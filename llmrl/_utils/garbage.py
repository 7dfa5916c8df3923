"""Python's search for garbage, made rarer while conversations are in flight."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

NUM_OBJECTS = 50_000
"""Objects that come about, beyond those that go, between two searches; Python's own number is 700."""

_lock = threading.RLock()  # a search itself may end an owner
_num_owners = 0
_before: tuple[int, int, int] = gc.get_threshold()


def search_rarely(owner: object) -> Callable[[], None]:
    """Have Python look for garbage rarely while `owner` lives, or until what this returns is called.

    A turn makes a hundred objects that live to the next, and that counting references frees then. By Python's own
    number they are looked at again and again, and whenever they have been a quarter of all objects of the process, all
    of these: half a million once torch is imported. A larger number that the program
    has set, or a search that is switched off, stays as it is.

    Example:
        >>> class Owner: ...
        >>> owner = Owner()
        >>> search_as_before = search_rarely(owner)
        >>> gc.get_threshold()[0] >= 50_000
        True
        >>> search_as_before()
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
    """Free unreachable objects that were made since the last searches, such as a step's tensors in a cycle.

    Example:
        >>> search_young()
    """
    if gc.isenabled():
        gc.collect(1)


def _end() -> None:
    global _num_owners
    with _lock:
        _num_owners -= 1
        if not _num_owners and gc.get_threshold() == (NUM_OBJECTS, *_before[1:]):
            gc.set_threshold(*_before)
