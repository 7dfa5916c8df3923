"""Calls in threads, and coroutines that synchronous code waits for."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading

import pytest

from llmrl._utils.asynchronous import run_sync
from llmrl._utils.threads import WorkerThread
from llmrl.envs import AdditionEnv
from llmrl.envs.stepper import EnvStepper


def test_the_thread_of_an_environment_ends_with_its_stepper():
    thread = asyncio.run(EnvStepper(AdditionEnv.make()).call(threading.current_thread))
    gc.collect()
    thread.join(240)
    assert not thread.is_alive()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_call_after_the_shutdown_is_refused(is_used):
    stepper = EnvStepper(AdditionEnv.make())

    async def main():
        if is_used:
            await stepper.call(int)
        stepper.shutdown()
        stepper.shutdown()
        async with asyncio.timeout(0.3):
            await stepper.call(int)

    with pytest.raises(RuntimeError, match="'llmrl-env' is closed"):
        asyncio.run(main())


def test_a_thread_that_was_left_behind_takes_no_more_calls():
    worker = WorkerThread("test")

    async def main():
        left = await worker.call(threading.current_thread)
        await asyncio.sleep(0.05)  # by now it waits for its next call
        worker.leave_behind()
        users = [await worker.call(threading.current_thread) for _ in range(3)]
        return left, users

    left, users = asyncio.run(main())
    worker.close()
    left.join(240)
    assert not left.is_alive() and left not in users and len(set(users)) == 1


def test_an_interrupt_ends_work_that_a_notebook_waits_for():
    cancelled = []

    async def work():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(240)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def cell():
        run_sync(work())

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        signal.signal(signal.SIGINT, before)
        loop.close()
    assert cancelled == [True]
