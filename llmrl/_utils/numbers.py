"""Validation of numbers from user functions, the location of such functions, and the interval of a share."""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable

_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32, the dtype of rewards."""


def finite_number(value: object, name: str) -> float:
    """Return a Python or NumPy number, or a tensor with one element, as a float.

    Raises TypeError if the value is not a number (text never is), and ValueError if it is not finite in float32.

    Example:
        >>> finite_number(True, "reward"), finite_number(2, "reward")
        (1.0, 2.0)
        >>> finite_number("2", "reward")
        Traceback (most recent call last):
        TypeError: reward must be a number, got '2' (str).
    """
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]  # raises for any value that is not a number
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with several elements
        raise TypeError(f"{name} must be a number, got {value!r:.80} ({type(value).__name__}).") from None
    except OverflowError:
        number = math.inf
    if not abs(number) <= _LARGEST:
        raise ValueError(f"{name} must be a finite number, got {value!r:.80}.")
    return number


def location_of(function: Callable[..., object], error: BaseException | None = None) -> str:
    """Return `file:line` of a function, or of its last line in `error`'s traceback; "" for a built-in function."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))
    lines = [code.co_firstlineno, *(frame.lineno for frame in frames if frame.filename == code.co_filename)]
    return f"{code.co_filename}:{lines[-1]}"


def wilson_interval(share: float, size: float, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's (1927) interval of a share that was measured on `size` independent trials.

    `z` is the half-width in standard errors; 1.96 gives the 95 % interval.

    Example:
        >>> low, high = wilson_interval(0.5, 100)
        >>> round(low, 3), round(high, 3)
        (0.404, 0.596)
    """
    shrink = 1 + z * z / size
    centre = (share + z * z / (2 * size)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / size + z * z / (4 * size * size))
    return max(0.0, centre - half), min(1.0, centre + half)


def is_same(one: float, other: float) -> bool:
    """Return whether two numbers are equal, or both NaN."""
    return one == other or (math.isnan(one) and math.isnan(other))
