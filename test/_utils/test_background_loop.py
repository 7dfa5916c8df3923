"""The loop that bridges an engine's thread and the loops that await it."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback

import pytest
from waiting import wait_until

from llmrl._utils import background_loop
from llmrl._utils.background_loop import BackgroundLoop, Mailbox
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl.engines.environment import starting_environment


@pytest.fixture
def background():
    loop = BackgroundLoop("test")
    yield loop
    loop.close()


async def double(value):
    await asyncio.sleep(0)
    return 2 * value


def test_many_waits_from_many_loops(background):
    async def wait_all():
        return await asyncio.gather(*(background.wait(double(i)) for i in range(200)))

    results = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(wait_all()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[2 * i for i in range(200)]] * 4


def test_errors_arrive(background):
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(background.wait(fail()))
    with pytest.raises(KeyError):
        background.run(fail())


def test_calls_after_one_that_raises_are_made():
    made, raised = [], []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: raised.append(context["exception"]))
    mailbox = Mailbox(loop)
    for function, argument in ((made.append, 1), (int, "x"), (made.append, 2)):
        mailbox.post(function, argument)
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert made == [1, 2] and [type(error) for error in raised] == [ValueError]


def test_a_result_that_comes_as_the_time_is_up_is_the_result():
    loop = ReplaceableLoop("test")

    async def both_at_once(value):
        waiting = asyncio.ensure_future(loop.wait(double(value), 0.2))
        await asyncio.sleep(0)  # begins the wait
        loop.current.run(asyncio.sleep(0.25))  # blocks this thread: it finds the result and the limit together
        return await waiting

    assert asyncio.run(both_at_once(2)) == 4
    with pytest.raises(TypeError):
        asyncio.run(both_at_once(None))
    loop.close()


def test_cancelling_the_wait_cancels_the_work(background):
    started, cancelled = threading.Event(), threading.Event()

    async def work():
        started.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main():
        task = asyncio.create_task(background.wait(work()))
        assert await asyncio.to_thread(started.wait, 240)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cancelled.wait(240)


def test_closing_cancels_what_waits(background):
    async def main():
        task = asyncio.create_task(background.wait(asyncio.sleep(60)))
        await asyncio.sleep(0.05)
        await asyncio.to_thread(background.close)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(RuntimeError, match="is closed"):
        background.run(double(1))


def test_tasks_end_undisturbed_if_the_loop_is_stopped_again(background):
    ended = []
    started, is_ending = threading.Event(), threading.Event()
    may_end = asyncio.Event()

    async def work():
        try:
            started.set()
            await asyncio.sleep(60)
        finally:
            is_ending.set()
            await may_end.wait()
            ended.append(True)

    background.submit(work())
    assert started.wait(240)
    background.stop()
    assert is_ending.wait(240)
    background.stop()
    background.loop.call_soon_threadsafe(may_end.set)
    background.close()
    assert ended == [True]


def test_a_loop_ends_if_a_task_exits_while_it_stops(background):
    background.post(lambda: (background.stop(), background.loop.call_soon(sys.exit)))
    background.thread.join(240)
    assert not background.thread.is_alive()


def test_a_loop_does_not_wait_for_itself(background):
    async def outer():
        background.run(double(1))

    with pytest.raises(RuntimeError, match="cannot block on itself"):
        background.run(outer())


def test_loops_that_are_gone_are_forgotten(background):
    for _ in range(5):
        asyncio.run(background.wait(double(1)))
    # The last one, until the next comes; loops of other tests may go on.
    assert sum(loop.is_closed() for loop in background_loop._mailboxes) <= 1


def test_starting_leaves_the_environment_and_main_as_they_were(monkeypatch):
    monkeypatch.setenv("LLMRL_TEST_KEPT", "before")
    environment, main_file = dict(os.environ), getattr(sys.modules["__main__"], "__file__", None)
    with starting_environment({"LLMRL_TEST_KEPT": "inside", "LLMRL_TEST_NEW": "1"}):
        assert os.environ["LLMRL_TEST_KEPT"] == "inside"
        assert not hasattr(sys.modules["__main__"], "__file__")
        os.environ["LLMRL_TEST_BY_OTHERS"] = "1"
    assert dict(os.environ) == environment
    assert getattr(sys.modules["__main__"], "__file__", None) == main_file


def test_starts_at_once_leave_main_as_it_was_before_the_first():
    main = sys.modules["__main__"]
    before = getattr(main, "__file__", None), main.__spec__

    def start():
        with starting_environment({}):
            pass

    others = [threading.Thread(target=start) for _ in range(2)]
    with starting_environment({}):
        for other in others:
            other.start()
        # Each has begun, and waits for its turn.
        wait_until(lambda: all("starting_environment" in frames_of(other) for other in others))
    for other in others:
        other.join()
    assert (getattr(main, "__file__", None), main.__spec__) == before


def frames_of(thread):
    """The names of the functions that a thread is in."""
    return [frame.name for frame in traceback.extract_stack(sys._current_frames()[thread.ident])]
