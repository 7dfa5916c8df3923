"""Conversion of everything that user code raises to an `Exception`.

An event loop would act on a `SystemExit`, `CancelledError` or `GeneratorExit` that escapes from user code.
"""

from __future__ import annotations

import asyncio
import re
import threading
import traceback
from collections.abc import Awaitable
from typing import TypeVar

Result = TypeVar("Result")
_FRAME = re.compile(r'(^  File ".+", line \d+.*\n(?:    .*\n?)*)', re.MULTILINE)
_PACKAGES = re.compile(r"/(?:site-packages|lib/python3\.\d+)/")


class EscapedError(RuntimeError):
    """User code raised an error that a loop or future would act on; that error is the cause of this one."""


class NothingLearned(RuntimeError):
    """A run ended without a step that changed the weights."""


def as_exception(error: BaseException) -> Exception:
    """Return the error itself, or an `EscapedError` caused by it if event loops or futures would act on it.

    A KeyboardInterrupt in the main thread is raised again.

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
    """Return the type and the text of an error, as `TYPE: TEXT`."""
    try:
        text = str(error)
    except Exception:  # raised by a user's class
        text = "its text could not be produced"
    return text if isinstance(error, EscapedError) else f"{type(error).__name__}: {text}"


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error as Python prints it."""
    return "".join(traceback.format_exception(error))


def without_packages(text: str) -> str:
    r"""Return a traceback or stack without frames of installed packages, except for the innermost frame.

    Example:
        >>> inner = '  File "/env/lib/python3.11/site-packages/client.py", line 3, in ask\n    send()\n'
        >>> print(without_packages('  File "mine.py", line 1, in play\n    ask()\n' + 2 * inner + "KeyError: 'a'"))
          File "mine.py", line 1, in play
            ask()
          (1 frame of installed packages)
          File "/env/lib/python3.11/site-packages/client.py", line 3, in ask
            send()
        KeyError: 'a'
    """
    parts = _FRAME.split(text)  # alternately the text between frames and a frame
    shown = parts[:1]
    num_hidden = 0
    for index in range(1, len(parts), 2):
        frame, between = parts[index : index + 2]
        is_last = bool(between) or index == len(parts) - 2
        if not is_last and _PACKAGES.search(frame.partition("\n")[0]):
            num_hidden += 1
            continue
        if num_hidden:
            shown.append(f"  ({num_hidden} frame{'s' * (num_hidden > 1)} of installed packages)\n")
            num_hidden = 0
        shown += [frame, between]
    return "".join(shown)


async def guarded(work: Awaitable[Result]) -> Result:
    """Await user code in its own task; raise only its exceptions (`as_exception`) and the task's cancellation."""
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
    """Await user code. `as_exception` converts its errors; a `CancelledError` means that the caller was cancelled."""
    task = asyncio.ensure_future(guarded(work))
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        raise
    try:
        return task.result()
    except asyncio.CancelledError as error:  # the work's own, since llmrl did not cancel the task
        raise as_exception(error) from error


async def cancel_this_task() -> None:
    """Cancel the running task. A `CancelledError` that is raised in any other way counts as an error of user code."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)
