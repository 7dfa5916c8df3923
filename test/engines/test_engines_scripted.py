"""ScriptedEngine honours the engine protocol: budget, stops, abort, versions, faults."""

from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines import Engine, EngineError, SamplingConfig
from llmrl.engines.hang_detector import HangWatch
from llmrl.testing import ScriptedEngine, answers_of_length, log_normal, run_in_virtual_time, with_stragglers

SAMPLING = SamplingConfig(max_new_tokens=4)


def generate(engine, prompt_ids=(1,), sampling=SAMPLING, **options):
    return asyncio.run(engine.generate(prompt_ids, sampling, **options))


def test_it_is_an_engine():
    assert isinstance(ScriptedEngine([[1]]), Engine)


def test_answers_come_in_turn_and_again():
    engine = ScriptedEngine([[1], [2]])
    assert [generate(engine).token_ids for _ in range(3)] == [[1], [2], [1]]


def test_a_function_sees_the_prompt_and_text_is_encoded():
    engine = ScriptedEngine(lambda prompt_ids: "x" * len(prompt_ids), encode=lambda text: [ord(c) for c in text])
    assert generate(engine, [5, 6]).token_ids == [120, 120]


def test_text_without_an_encoder_is_refused():
    with pytest.raises(ValueError, match="encode="):
        generate(ScriptedEngine(["text"]))


def test_one_string_is_not_a_list_of_answers():
    with pytest.raises(ValueError, match="script"):
        ScriptedEngine("text")


def test_the_budget_cuts_and_says_length():
    completion = generate(ScriptedEngine([[1, 2, 3, 4, 5]]))
    assert (completion.token_ids, completion.finish_reason) == ([1, 2, 3, 4], "length")
    assert len(completion.log_probs) == len(completion.versions) == 4


def test_the_budget_is_clipped_to_the_context_that_remains():
    engine = ScriptedEngine([[1, 2, 3]], max_model_len=4)
    assert generate(engine, [9, 9]).token_ids == [1, 2]
    with pytest.raises(ValueError, match="prompt_ids has 4 tokens"):
        generate(engine, [9] * 4)


def test_stop_tokens_stay_and_end_the_completion():
    engine = ScriptedEngine([[1, 7, 3]], stop_token_ids=[7])
    completion = generate(engine)
    assert (completion.token_ids, completion.finish_reason) == ([1, 7], "stop")
    assert generate(engine, sampling=SAMPLING.with_changes(ignore_eos=True)).token_ids == [1, 7, 3]
    assert generate(engine, sampling=SAMPLING.with_changes(stop_token_ids=(1,))).token_ids == [1]


def test_a_stop_string_that_ends_inside_a_token_keeps_the_token():
    engine = ScriptedEngine([[1, 2, 3]], decode=lambda ids: "".join({1: "ab", 2: "cEN", 3: "Dx"}[i] for i in ids))
    completion = generate(engine, sampling=SAMPLING.with_changes(stop=("END",)))
    assert (completion.token_ids, completion.stop_string) == ([1, 2, 3], "END")


def test_log_probs_may_be_computed():
    engine = ScriptedEngine([[1, 2]], log_prob=lambda ids: [-float(i) for i in ids])
    assert generate(engine).log_probs == [-1.0, -2.0]


def test_abort_returns_the_tokens_that_were_due():
    async def run():
        engine = ScriptedEngine([list(range(100))], latency_s=1.0)
        task = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=100), request_id="a"))
        await asyncio.sleep(0.3)
        await engine.abort("a")
        return await task, engine.num_in_flight

    completion, num_in_flight = run_in_virtual_time(run())
    assert completion.finish_reason == "abort"
    assert 10 < len(completion.token_ids) < 60
    assert num_in_flight == 0


def test_a_version_set_in_flight_is_that_of_later_tokens_only():
    async def run():
        engine = ScriptedEngine([list(range(10))], latency_s=0.2)
        task = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=10)))
        await asyncio.sleep(0.1)
        engine.policy_version = 1
        return (await task).versions

    versions = run_in_virtual_time(run())
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


def test_faults_on_command():
    engine = ScriptedEngine([[1]])
    engine.fail_next(2)
    for _ in range(2):
        with pytest.raises(EngineError):
            generate(engine)
    assert generate(engine).token_ids == [1]


def test_shutdown_fails_requests_in_flight_and_later_ones():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=1000.0)
        task = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0.01)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineError):
            await task
        with pytest.raises(EngineError):
            await engine.generate([1], SAMPLING)

    asyncio.run(run())


def test_a_request_id_in_flight_is_refused():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=0.05)
        task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="same"):
            await engine.generate([1], SAMPLING, request_id="same")
        await task
        await engine.generate([1], SAMPLING, request_id="same")

    asyncio.run(run())


def test_requests_are_recorded():
    engine = ScriptedEngine([[1]])
    generate(engine, [3, 4], routing_key="group")
    assert engine.requests == [([3, 4], SAMPLING, "group")]


# -- on a clock that jumps


def test_hours_of_latency_pass_at_once_in_virtual_time():
    async def run():
        engine = ScriptedEngine([list(range(4))], latency_s=lambda prompt, answer: 3600.0 * len(answer))
        await asyncio.gather(*(engine.generate([1], SAMPLING.with_changes(max_new_tokens=n)) for n in (1, 2, 4)))
        return asyncio.get_running_loop().time(), engine.busy_s

    assert run_in_virtual_time(run()) == (pytest.approx(4 * 3600.0), pytest.approx(7 * 3600.0))


def test_no_more_than_max_num_seqs_are_served_at_once_and_in_order():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=1.0, max_num_seqs=2)
        loop, ends = asyncio.get_running_loop(), []

        async def one(name):
            await engine.generate([1], SAMPLING, request_id=name)
            ends.append((name, loop.time()))

        await asyncio.gather(*(one(name) for name in "abcde"))
        return ends

    ends = run_in_virtual_time(run())
    assert [name for name, _ in ends] == list("abcde")
    assert [end for _, end in ends] == pytest.approx([1, 1, 2, 2, 3])


def test_aborted_and_cancelled_requests_leave_their_place():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=1.0, max_num_seqs=1)
        running, queued, aborted, last = (
            asyncio.create_task(engine.generate([1], SAMPLING, request_id=name)) for name in "abcd"
        )
        await asyncio.sleep(0.5)
        queued.cancel()
        await engine.abort("c")
        running.cancel()
        results = await asyncio.gather(running, queued, aborted, last, return_exceptions=True)
        return results, asyncio.get_running_loop().time(), engine.num_in_flight

    (running, queued, aborted, last), now_s, num_in_flight = run_in_virtual_time(run())
    assert isinstance(running, asyncio.CancelledError)
    assert isinstance(queued, asyncio.CancelledError)
    assert (aborted.finish_reason, aborted.token_ids, last.token_ids) == ("abort", [], [1])
    assert (now_s, num_in_flight) == (pytest.approx(1.5), 0)


def test_versions_and_aborted_tokens_follow_the_virtual_clock():
    async def run():
        engine = ScriptedEngine([list(range(10))], latency_s=10.0)
        tasks = [
            asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=10), request_id=name))
            for name in "ab"
        ]
        await asyncio.sleep(4.5)
        engine.policy_version = 1
        await asyncio.sleep(3.0)
        await engine.abort("a")
        return await asyncio.gather(*tasks)

    aborted, whole = run_in_virtual_time(run())
    assert aborted.versions == [0] * 4 + [1] * 3
    assert whole.versions == [0] * 4 + [1] * 6


@pytest.mark.parametrize(("mode", "num_tokens", "end_s"), [("keep", 10, 110.0), ("abort", 4, 4.5)])
def test_a_pause_holds_or_ends_what_is_in_flight(mode, num_tokens, end_s):
    async def run():
        engine = ScriptedEngine([list(range(10))], latency_s=10.0)
        task = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=10)))
        loop = asyncio.get_running_loop()
        task.add_done_callback(lambda _: ends.append(loop.time()))
        ends = []
        await asyncio.sleep(4.5)
        engine.pause(mode)
        late = asyncio.create_task(engine.generate([1], SamplingConfig(max_new_tokens=1)))
        await asyncio.sleep(100.0)
        assert not late.done()
        engine.resume()
        await late
        return len((await task).token_ids), ends, loop.time()

    done, ends, now_s = run_in_virtual_time(run())
    assert (done, ends, now_s) == (num_tokens, [pytest.approx(end_s)], pytest.approx(114.5))


def test_a_pause_may_wait_for_what_is_in_flight():
    async def run():
        engine = ScriptedEngine([[1]], latency_s=0.1)
        task = asyncio.create_task(engine.generate([1], SAMPLING))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(engine.pause, "wait")
        return task.done() or engine.num_in_flight

    assert asyncio.run(run()) in (True, 0)


def test_a_hanging_request_ends_when_it_is_aborted_or_cancelled():
    async def run():
        engine = ScriptedEngine([[1, 2]], latency_s=1.0)
        engine.hang_next(2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate([1], SAMPLING), 1e6)
        task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="a"))
        await asyncio.sleep(10)
        await engine.abort("a")
        return await task, await engine.generate([1], SAMPLING), engine.num_in_flight

    aborted, served, num_in_flight = run_in_virtual_time(run())
    assert (aborted.finish_reason, aborted.token_ids, served.token_ids, num_in_flight) == ("abort", [], [1, 2], 0)


def test_drawn_latencies_and_lengths_are_as_asked_and_repeat():
    draws = [log_normal(2.0, 0.5, seed=3) for _ in range(2)]
    first, again = ([draw() for _ in range(2000)] for draw in draws)
    assert first == again
    assert statistics.median(first) == pytest.approx(2.0, rel=0.1)
    assert statistics.stdev(map(math.log, first)) == pytest.approx(0.5, rel=0.1)
    straggling = with_stragglers(log_normal(1.0, 0.0), 20.0, one_in=50)
    values = [straggling() for _ in range(10000)]
    assert 120 < values.count(20.0) < 280
    script = answers_of_length(log_normal(0.2, 0.0), end_token_id=9)
    assert script([1]) == [9]
    with pytest.raises(ValueError, match="median"):
        log_normal(0.0)
    with pytest.raises(ValueError, match="one_in"):
        with_stragglers(straggling, 1.0, one_in=0)


@pytest.mark.slow
def test_an_engine_that_hangs_is_ended_by_its_watch_and_a_slow_one_is_not():
    background = BackgroundLoop("test-watch")

    async def play(engine, watch, answer_s):
        engine._latency_s = answer_s
        watch.begin(engine, background)
        return await engine.generate([1], SAMPLING)

    def played(engine, watch, answer_s=0.0):
        return background.submit(play(engine, watch, answer_s))

    slow, watch = ScriptedEngine([[1] * 200], max_model_len=1000), HangWatch(0.2)
    assert len(played(slow, watch, 0.8).result(30).token_ids) > 0 and slow.is_alive and not watch.why
    engine, watch = ScriptedEngine([[1] * 200], max_model_len=1000), HangWatch(0.2)
    engine.hang()
    request = played(engine, watch)
    with pytest.raises(EngineError):
        request.result(30)
    assert not engine.is_alive and "hang_timeout_seconds" in watch.why
    for_ever = HangWatch(None)
    engine = ScriptedEngine([[1]])
    assert played(engine, for_ever).result(30).token_ids == [1] and not for_ever.why
    with pytest.raises(ValueError, match="hang_timeout_seconds"):
        HangWatch(0)
    background.close()
