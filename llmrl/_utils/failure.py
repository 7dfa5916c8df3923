"""What escapes from code of users, whatever it is: an `Exception`, so that it ends nothing but what it escaped from.

A reward that runs `sys.exit()`, a tool in which a cancel scope leaks, a generator that is closed: `SystemExit`,
`CancelledError` and `GeneratorExit` are no `Exception`s, and event loops take them for orders of their own.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")


class EscapedError(RuntimeError):
    """A `BaseException` other than an `Exception` escaped from user code; it is the cause of this error."""


def as_exception(error: BaseException) -> Exception:
    """Return the error, or an `EscapedError` caused by it where futures and loops would take it for an order.

    Raises KeyboardInterrupt on the main thread, where it is the process's own.

    Example:
        >>> as_exception(SystemExit(3))
        EscapedError('SystemExit: 3')
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration)):
        return error
    escaped = EscapedError(describe(error))
    escaped.__cause__ = error
    return escaped


def describe(error: BaseException) -> str:
    """Return an error in a line: its type and its text.

    Example:
        >>> describe(KeyError("a")), describe(as_exception(SystemExit(3)))
        ("KeyError: 'a'", 'SystemExit: 3')
    """
    try:
        text = str(error)
    except Exception:  # of a user's class
        text = "its text cannot be made"
    return text if isinstance(error, EscapedError) else f"{type(error).__name__}: {text}"


def traceback_of(error: BaseException) -> str:
    """Return where an error comes from, as Python prints it."""
    return "".join(traceback.format_exception(error))


async def guarded(work: Awaitable[Result]) -> Result:
    """Await something of a user's in a task of its own: only exceptions, and cancellations, leave it."""
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise as_exception(error) from error


async def contained(work: Awaitable[Result]) -> Result:
    """Await something of a user's on this loop: what leaves it is an exception; a cancellation is always the caller's.

    When the caller is cancelled, `work` is too, and not waited for.

    Raises what it raised, as by `as_exception`.
    """
    task = asyncio.ensure_future(guarded(work))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    return result_of(task)


def result_of(task: asyncio.Future[Result]) -> Result:
    """Return the result of a task that has ended and that llmrl did not cancel.

    Raises what it raised, as by `as_exception`.
    """
    try:
        return task.result()
    except asyncio.CancelledError as error:
        raise as_exception(error) from error


async def cancel_this_task() -> None:
    """Cancel the running task, which alone may raise a `CancelledError`: any other is taken for one that escaped."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
