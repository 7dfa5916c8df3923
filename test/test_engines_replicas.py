"""Replicas: siblings stay together, load is spread, a dead replica is left out."""

from __future__ import annotations

import asyncio

import pytest

from llmrl.engines import Engine, EngineError, EngineReplicas, SamplingConfig, ScriptedEngine

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
        engines = EngineReplicas([ScriptedEngine([list(range(10))], latency_s=5.0) for _ in range(2)])
        tasks = [
            asyncio.create_task(engines.generate([1], SamplingConfig(max_new_tokens=10), request_id=name))
            for name in "ab"
        ]
        await asyncio.sleep(0.01)
        assert engines.num_in_flight == 2
        with pytest.raises(ValueError, match="in flight"):
            await engines.generate([1], SAMPLING, request_id="a")
        await engines.abort("b")
        completion = await tasks[1]
        assert not tasks[0].done()
        await engines.abort("a")
        await tasks[0]
        return completion, engines.num_in_flight

    completion, num_in_flight = asyncio.run(run())
    assert completion.finish_reason == "abort"
    assert num_in_flight == 0


def test_the_version_is_what_all_have_reached_and_the_context_what_all_have():
    engines = EngineReplicas([ScriptedEngine([[1]], max_model_len=10), ScriptedEngine([[1]], max_model_len=20)])
    engines[0].policy_version = 3
    assert (engines.policy_version, engines.max_model_len) == (0, 10)
    with pytest.raises(ValueError, match="empty"):
        EngineReplicas([])
