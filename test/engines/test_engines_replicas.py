"""Replicas: siblings stay together, load is spread, a dead replica is left out."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch
from waiting import wait_until

from llmrl.engines import (
    AsyncVLLM,
    Engine,
    EngineError,
    EngineReplicas,
    SamplingConfig,
    ScoresTokens,
    TokenScores,
)
from llmrl.engines.launch import start_engines
from llmrl.testing import ScriptedEngine

SAMPLING = SamplingConfig(max_new_tokens=4)


def make(num_replicas, **options):
    engines = [ScriptedEngine([[index]], latency_s=0.02) for index in range(num_replicas)]
    return EngineReplicas(engines, **options)


async def generate_many(engines, keys):
    completions = await asyncio.gather(*(engines.generate([9], SAMPLING, routing_key=key) for key in keys))
    return [completion.token_ids[0] for completion in completions]


def test_they_are_one_engine_and_a_sequence():
    engines = make(3)
    assert isinstance(engines, Engine)
    assert len(engines) == 3
    assert list(engines) == [engines[0], engines[1], engines[2]]


def test_load_is_spread_evenly():
    assert sorted(asyncio.run(generate_many(make(3), [None] * 9))) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_siblings_go_to_one_replica_and_come_back_to_it():
    engines = make(2)
    first = asyncio.run(generate_many(engines, ["a", "b"] * 4))
    assert first == [0, 1] * 4
    assert asyncio.run(generate_many(engines, ["b", "a"])) == [1, 0]


def test_a_key_leaves_an_overloaded_replica():
    assert set(asyncio.run(generate_many(make(2, max_imbalance=2), ["same"] * 12))) == {0, 1}


def test_a_dead_replica_is_left_out():
    engines = make(2)
    assert asyncio.run(generate_many(engines, ["a"])) == [0]
    engines[0].shutdown()
    assert asyncio.run(generate_many(engines, ["a", None])) == [1, 1]
    engines.shutdown()
    assert not engines.is_alive
    with pytest.raises(EngineError, match="None of the 2"):
        asyncio.run(generate_many(engines, [None]))


def test_abort_reaches_the_right_replica_and_counts_return_to_zero():
    async def run():
        engines = EngineReplicas([ScriptedEngine([list(range(10))], latency_s=1000.0) for _ in range(2)])
        tasks = [
            asyncio.create_task(engines.generate([1], SamplingConfig(max_new_tokens=10), request_id=name))
            for name in "ab"
        ]
        await asyncio.sleep(0.01)
        assert sum(engines.loads) == 2
        with pytest.raises(ValueError, match="in flight"):
            await engines.generate([1], SAMPLING, request_id="a")
        await engines.abort("b")
        completion = await tasks[1]
        assert not tasks[0].done()
        await engines.abort("a")
        await tasks[0]
        return completion, sum(engines.loads)

    completion, num_in_flight = asyncio.run(run())
    assert completion.finish_reason == "abort"
    assert num_in_flight == 0


def test_the_version_is_what_all_have_reached_and_the_context_what_all_have():
    engines = EngineReplicas([ScriptedEngine([[1]], max_model_len=10), ScriptedEngine([[1]], max_model_len=20)])
    engines[0].policy_version = 3
    assert (engines.policy_version, engines.max_model_len) == (0, 10)
    with pytest.raises(ValueError, match="empty"):
        EngineReplicas([])


# -- faults: numbers in are numbers out


def scripted(answer, **options):
    return lambda index=0: ScriptedEngine([[answer]], **options)


def test_requests_of_a_dead_replica_are_tried_again_elsewhere_under_new_ids():
    engines = make(3)

    async def run():
        tasks = [
            asyncio.create_task(engines.generate([9], SAMPLING, request_id=f"r{index}", routing_key=f"g{index // 4}"))
            for index in range(24)
        ]
        await asyncio.sleep(0.005)
        engines[0].shutdown()
        return await asyncio.gather(*tasks)

    completions = asyncio.run(run())
    assert len(completions) == 24
    assert all(completion.token_ids in ([1], [2]) for completion in completions)
    assert (engines.num_retried, engines.num_deaths, engines.num_restarts) == (8, 1, 0)
    assert sum(engines.loads) == 0
    # Siblings that were together are together again: each group's four went to one replica.
    again = [request for engine in engines[1:] for request in engine.requests]
    assert len(again) == 24
    for group in range(6):
        assert len({id(e) for e in engines[1:] for *_, key in e.requests if key == f"g{group}"}) == 1


def test_a_failure_of_a_living_replica_is_tried_again_on_another_and_then_raised():
    engines = make(2)
    engines[0].fail_next()
    assert asyncio.run(engines.generate([9], SAMPLING)).token_ids == [1]
    for engine in engines:
        engine.fail_next(2)
    with pytest.raises(EngineError, match="because of fail_next"):
        asyncio.run(engines.generate([9], SAMPLING))
    assert engines.serving == {0, 1}
    assert sum(engines.loads) == 0


class ScoringEngine(ScriptedEngine):
    """Says of each token its own number as a log-prob, once it is allowed to."""

    def __init__(self, number):
        super().__init__([[number]])
        self.number, self.num_scored = number, 0

    async def score(self, token_ids, *, top_k=0):
        await asyncio.sleep(0)
        if not self.is_alive:
            raise EngineError("died")
        self.num_scored += 1
        empty = torch.empty(len(token_ids), top_k)
        return TokenScores(torch.full((len(token_ids),), -1.0 - self.number), empty.long(), empty)


def test_given_tokens_are_scored_by_any_replica_and_again_where_one_dies():
    engines = EngineReplicas([ScoringEngine(number) for number in range(3)])
    assert isinstance(engines, ScoresTokens)

    async def run():
        tasks = [asyncio.create_task(engines.score([5] * length, top_k=2)) for length in range(2, 14)]
        await asyncio.sleep(0)
        assert engines.loads == (4, 4, 4)
        engines[1].shutdown()
        return await asyncio.gather(*tasks)

    scores = asyncio.run(run())
    assert [tuple(score.top_ids.shape) for score in scores] == [(length, 2) for length in range(2, 14)]
    assert {float(score.log_probs[0]) for score in scores} == {-1.0, -3.0}
    assert sum(engine.num_scored for engine in engines) == 12 and not engines[1].num_scored
    assert (engines.num_retried, engines.num_deaths, engines.loads) == (4, 1, (0, 0, 0))
    engines.shutdown()
    with pytest.raises(EngineError, match="None of the 3"):
        asyncio.run(engines.score([5, 6]))


def test_replicas_that_do_not_score_tokens_say_so():
    engines = make(2)
    with pytest.raises(TypeError, match="ScriptedEngine does not score given tokens"):
        asyncio.run(engines.score([5, 6]))
    assert engines.loads == (0, 0)


def test_a_dead_replica_is_restarted_and_gets_the_current_weights_before_it_serves():
    engines = EngineReplicas([scripted(0)(), scripted(1)()], restart=scripted(7))
    for engine in engines:
        engine.policy_version = 5
    may_finish, seen = threading.Event(), []

    def bring_to_version(engine):
        assert engine is engines[0]
        seen.append((engine.policy_version, engines.serving))
        assert may_finish.wait(240)
        engine.policy_version = 5

    engines.before_serving.append(bring_to_version)
    engines[0].shutdown()
    assert asyncio.run(generate_many(engines, [None] * 4)) == [1] * 4
    wait_until(lambda: seen)
    assert asyncio.run(generate_many(engines, [None] * 4)) == [1] * 4
    may_finish.set()
    wait_until(lambda: engines.serving == {0, 1})
    completion = asyncio.run(engines.generate([9], SAMPLING))
    assert (completion.token_ids, completion.versions) == ([7], [5])
    assert seen == [(0, {1})]
    assert (engines.num_deaths, engines.num_restarts, engines.policy_version) == (1, 1, 5)


def test_requests_wait_where_all_replicas_are_being_restarted():
    may_start = threading.Event()

    def restart(index):
        assert may_start.wait(240)
        return ScriptedEngine([[7 + index]])

    async def run():
        engines = EngineReplicas([scripted(0, latency_s=1000.0)() for _ in range(2)], restart=restart)
        tasks = [
            asyncio.create_task(engines.generate([9], SAMPLING, request_id=str(index), routing_key=str(index)))
            for index in range(6)
        ]
        await asyncio.sleep(0.01)
        for engine in engines:
            engine.shutdown()
        while sum(engines.loads):  # each request has heard of it
            await asyncio.sleep(0.005)
        assert engines.is_alive
        assert not any(task.done() for task in tasks)
        tasks[0].cancel()
        await engines.abort("1")
        aborted = await asyncio.wait_for(tasks[1], 240)
        may_start.set()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 240)
        return aborted, results, engines

    aborted, results, engines = asyncio.run(run())
    assert (aborted.finish_reason, aborted.token_ids) == ("abort", [])
    assert isinstance(results[0], asyncio.CancelledError)
    assert all(result.token_ids in ([7], [8]) for result in results[2:])
    wait_until(lambda: engines.num_restarts == 2)  # one of them answered, perhaps all
    assert engines.loads == (0, 0)


def test_a_replica_that_was_not_brought_to_the_weights_stays_out_until_it_has_them():
    engines = EngineReplicas([scripted(0)(), scripted(1)()], restart=scripted(7))

    def fail(engine):
        raise RuntimeError("the trainer is away")

    engines.before_serving.append(fail)
    for engine in engines:
        engine.policy_version = 2
    engines[0].shutdown()
    engines.refresh()
    wait_until(lambda: engines.num_restarts == 1 and not engines.recovering)
    assert engines.serving == {1}
    engines[1].shutdown()
    engines.refresh()
    wait_until(lambda: engines.num_restarts == 2 and not engines.recovering)
    with pytest.raises(EngineError, match="without weights of version 2"):
        asyncio.run(engines.generate([9], SAMPLING))
    for engine in engines:
        engine.policy_version = 3  # the next update reaches both
    assert engines.serving == {0, 1}
    assert asyncio.run(engines.generate([9], SAMPLING)).versions == [3]


def test_a_replica_that_missed_an_update_is_left_out_until_it_has_it():
    engines = make(2)
    engines[0].policy_version = 1
    engines.refresh()
    assert asyncio.run(generate_many(engines, [None] * 4)) == [0] * 4
    engines[1].policy_version = 1
    time.sleep(0.11)
    assert set(asyncio.run(generate_many(engines, [None] * 4))) == {0, 1}


def test_a_replica_that_cannot_be_restarted_is_given_up():
    attempts = []

    def restart(index):
        attempts.append(index)
        raise EngineError("no memory")

    engines = EngineReplicas([scripted(0)()], restart=restart, max_restarts=2)
    engines[0].shutdown()
    with pytest.raises(EngineError, match="None of the 1"):
        asyncio.run(engines.generate([9], SAMPLING))
    assert attempts == [0, 0]
    assert not engines.is_alive


def test_a_request_that_kills_every_engine_does_not_kill_for_ever():
    engines = None

    def poison(prompt_ids):
        for engine in engines:
            engine.shutdown()
        raise EngineError("killed by the request")

    engines = EngineReplicas([ScriptedEngine(poison)], restart=lambda index: ScriptedEngine(poison), num_retries=1)
    with pytest.raises(EngineError, match="killed by"):
        asyncio.run(engines.generate([9], SAMPLING))
    assert engines.num_deaths == 2


def test_shutdown_ends_engines_that_are_being_started_too():
    started, may_start = [], threading.Event()

    def restart(index):
        assert may_start.wait(240)
        started.append(ScriptedEngine([[1]]))
        return started[0]

    engines = EngineReplicas([scripted(0)()], restart=restart)
    engines[0].shutdown()
    engines.refresh()
    threading.Timer(0.05, may_start.set).start()
    engines.shutdown()
    assert not started[0].is_alive
    with pytest.raises(EngineError, match="None of the 1"):
        asyncio.run(engines.generate([9], SAMPLING))


def test_a_replica_that_hangs_is_replaced_and_its_requests_are_answered():
    def restart(index):
        return ScriptedEngine([[7]], latency_s=0.01)

    first = [ScriptedEngine([[index]] * 9, latency_s=0.05) for index in range(2)]
    first[0].hang()
    engines = EngineReplicas(first, restart=restart, hang_timeout_seconds=0.2)
    engines.policy_version = 4
    engines.before_serving.append(lambda engine: setattr(engine, "policy_version", 4))

    async def run():
        tasks = [
            asyncio.create_task(engines.generate([9], SAMPLING, request_id=str(index), routing_key=str(index)))
            for index in range(12)
        ]
        await asyncio.sleep(0)  # all are on their way, and none was answered
        assert first[0].is_alive
        assert engines.loads == (6, 6)
        return await asyncio.wait_for(asyncio.gather(*tasks), 240)

    completions = asyncio.run(run())
    assert len(completions) == 12
    assert all(completion.token_ids in ([1], [7]) and completion.versions == [4] for completion in completions)
    assert not first[0].is_alive
    assert (engines.num_hangs, engines.num_deaths, engines.num_retried) == (1, 1, 6)
    assert engines.loads == (0, 0)
    wait_until(lambda: engines.serving == {0, 1})
    assert engines.num_restarts == 1


def test_a_replica_that_is_replaced_before_anybody_looks_serves_again():
    """Its successor may be there, alive and current, before a request or a weight update asks who serves."""
    engines = make(2, restart=lambda index: ScriptedEngine([[7]]))
    for replaced in range(2):
        engines.replace_hanging(engines[replaced])
        for thread in list(engines.recovering.values()):
            thread.join()
        assert engines.num_restarts == replaced + 1
        assert engines.serving == {0, 1}


def test_without_a_restart_a_replica_that_hangs_is_left_out():
    engines = make(2, hang_timeout_seconds=0.1)

    async def run():
        engines[0].hang()
        return await asyncio.wait_for(generate_many(engines, [None] * 4), 240)

    assert asyncio.run(run()) == [1] * 4
    assert engines.serving == {1}


def test_requests_of_one_that_hangs_for_ever_fail_in_the_end():
    def restart(index=0):
        engine = ScriptedEngine([[7]])
        engine.hang()
        return engine

    engines = EngineReplicas([restart()], restart=restart, num_retries=1, hang_timeout_seconds=0.1)
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(asyncio.wait_for(engines.generate([9], SAMPLING), 240))
    assert engines.num_hangs == 2


@pytest.mark.slow
def test_a_process_that_was_stopped_does_not_take_its_engines_for_hanging():
    """Ctrl-Z, a debugger, a machine that is too busy: the clock went on, and no process looked at the engines."""
    engine = ScriptedEngine([[1, 2, 3, 4]], latency_s=0.2)  # a token each 0.05 s
    engines = EngineReplicas([engine], hang_timeout_seconds=0.4)

    async def run():
        task = asyncio.create_task(engines.generate([9], SAMPLING))
        await asyncio.sleep(0.11)  # it was looked at
        engine.hang()  # stopped as well
        time.sleep(0.6)
        await asyncio.sleep(0.01)  # it is looked at again
        engine._is_hanging = False
        engine.resume()
        return await task

    assert asyncio.run(run()).token_ids == [1, 2, 3, 4]
    assert engines.num_hangs == 0


@pytest.mark.slow
def test_slow_paused_and_idle_replicas_do_not_hang():
    slow = ScriptedEngine([list(range(50))], latency_s=0.8)  # a token each 0.016 s
    engines = EngineReplicas([slow], hang_timeout_seconds=0.15)

    async def run():
        assert await slow.progress() is None
        task = asyncio.create_task(engines.generate([9], SamplingConfig(max_new_tokens=50)))
        await asyncio.sleep(0.1)
        before = await slow.progress()
        slow.pause()
        assert before > 0 and await slow.progress() is None
        await asyncio.sleep(0.5)
        slow.resume()
        return await task

    assert len(asyncio.run(run()).token_ids) == 50
    assert (engines.num_hangs, engines.serving) == (0, {0})
    with pytest.raises(ValueError, match="hang_timeout_seconds"):
        EngineReplicas([slow], hang_timeout_seconds=0)
    with pytest.raises(ValueError, match="hang_timeout_seconds"):  # before an engine starts
        EngineReplicas.from_pretrained("no/model", hang_timeout_seconds=0)


def test_a_thousand_requests_through_random_deaths_are_each_answered_once():
    """Every 3 ms a random replica dies; each comes back after 10 ms with the version that the others have."""
    generator = random.Random(0)

    def restart(index):
        time.sleep(0.01)
        return ScriptedEngine(lambda prompt_ids: prompt_ids, latency_s=0.002)

    engines = EngineReplicas([restart(index) for index in range(4)], restart=restart, num_retries=50, max_restarts=100)
    engines.before_serving.append(lambda engine: setattr(engine, "policy_version", 1))
    engines.policy_version = 1
    slots = asyncio.Semaphore(64)

    async def one(index):
        async with slots:
            return await engines.generate([index], SAMPLING, request_id=str(index), routing_key=str(index // 8))

    async def kill():
        while True:
            await asyncio.sleep(0.003)
            engines[generator.randrange(4)].shutdown()

    async def run():
        killer = asyncio.create_task(kill())
        completions = await asyncio.gather(*(one(index) for index in range(1000)))
        killer.cancel()
        return completions

    completions = asyncio.run(run())
    assert [completion.token_ids for completion in completions] == [[index] for index in range(1000)]
    assert {version for completion in completions for version in completion.versions} == {1}
    assert engines.num_deaths > 3
    assert engines.num_retried > 10
    assert engines.loads == (0, 0, 0, 0)
    engines.shutdown()


def test_each_engine_samples_by_a_seed_of_its_own(monkeypatch):
    seeds = []

    def from_pretrained(model, *, seed, cpu_threads, hang_timeout_seconds):
        seeds.append(seed)
        return ScriptedEngine([[1]])

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", from_pretrained)
    _, start = start_engines("model", 3, False, None, None, {"seed": 5})
    start(1)
    assert sorted(seeds[:3]) == [5, 6, 7] and seeds[3:] == [8]
