"""What tests of things that happen elsewhere share: waiting for them, and whether a process is there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from llmrl.engines.token_stream import TokenStream


def wait_until(condition, timeout_s=240.0):
    """Return once `condition()` holds; fail when it never does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"it never came true in {timeout_s:g} s"
        time.sleep(0.01)


def patient(attempt, limits_s=(0.5, 5.0, 50.0)):
    """Return the first result of `attempt(limit_s)` that is not None.

    On a busy machine, the first limit can end an attempt before it has come to what the limit is to interrupt.
    """
    for limit_s in limits_s:
        if (result := attempt(limit_s)) is not None:
            return result
    raise AssertionError(f"{limits_s[-1]:g} s were too short for it")


async def begin(engine, prompt_ids, sampling, **options):
    """The task of a request that has its first tokens."""
    stream = TokenStream(lambda: None)
    task = asyncio.create_task(engine.generate(prompt_ids, sampling, stream=stream, **options))
    while not stream.token_ids:
        assert not task.done(), task
        await asyncio.sleep(0.01)
    return task


def is_running(pid):
    """Whether there is such a process, and it has not ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
