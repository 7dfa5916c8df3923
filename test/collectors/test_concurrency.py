"""How many rollouts are held in flight: the rule by itself, on a simulated engine, and in the collector."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.auto_concurrency import Load, collect
from llmrl import DatasetChatEnv, LLMCollector, RubricReward
from llmrl.collectors.concurrency import ConcurrencyLimit, TurnCounts, follow_load
from llmrl.engines.load import EngineLoad
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine, run_in_virtual_time

IDLE, FULL = EngineLoad(kv_use_max=0.3), EngineLoad(kv_use_max=1.0, num_waiting_max=4)


def turns(number, *, begun=0, lost=0.0):
    return TurnCounts(number, begun, 100 * number, round(100 * number * (1 - lost)))


@pytest.mark.slow
@given(st.data())
def test_the_limit_stays_in_its_bounds_and_moves_by_whole_steps(data):
    least = data.draw(st.integers(1, 20))
    most = data.draw(st.integers(least, 200))
    limit = ConcurrencyLimit(data.draw(st.integers(1, 300)), least=least, most=most)
    for _ in range(data.draw(st.integers(1, 30))):
        before, num_running = limit.value, data.draw(st.integers(0, 250))
        load = EngineLoad(data.draw(st.floats(0, 1)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40)))
        counts = turns(
            data.draw(st.integers(0, 60)), begun=data.draw(st.integers(0, 60)), lost=data.draw(st.floats(0, 1))
        )
        value = limit.observe(load, counts, num_running=num_running, version=data.draw(st.integers(0, 2)))
        assert least <= value <= most
        if value > before:  # only where it binds, and by no more than the rollouts that began
            assert num_running >= before and value - before <= counts.num_rollouts
            assert load.num_waiting_max == 0 and load.kv_use_max < 0.95
        assert value >= min(before, max(least, int(0.85 * min(before, num_running))))


def test_it_doubles_while_all_in_flight_are_replaced_until_the_first_cut():
    limit = ConcurrencyLimit(8, most=1000)
    for expected in (16, 32, 64):
        num = limit.value
        assert limit.observe(IDLE, turns(num, begun=num), num_running=num, version=0) == expected
    assert limit.observe(IDLE, turns(64, begun=64, lost=0.5), num_running=64, version=0) == int(64 * 0.85)
    num = limit.value
    assert limit.observe(IDLE, turns(num, begun=num), num_running=num, version=0) == int(64 * 0.85 + 0.15 * num)


def test_a_cut_is_judged_once_what_is_too_much_has_ended():
    limit = ConcurrencyLimit(100, most=1000)
    thrashing = EngineLoad(1.0, 9, num_preemptions=50)
    assert limit.observe(thrashing, turns(100, lost=1.0), num_running=100, version=0) == 85
    for num_running in (99, 92, 86):
        assert limit.observe(thrashing, turns(100, lost=1.0), num_running=num_running, version=0) == 85
    assert limit.observe(thrashing, turns(85, lost=1.0), num_running=85, version=0) == int(0.85 * 85)


def test_a_limit_that_does_not_bind_or_an_engine_that_is_full_lets_it_be():
    limit = ConcurrencyLimit(32, most=1000)
    assert limit.observe(IDLE, turns(40, begun=40), num_running=31, version=0) == 32
    assert limit.observe(FULL, turns(40, begun=40), num_running=32, version=0) == 32
    few = EngineLoad(0.5, 0, num_preemptions=2)
    assert limit.observe(few, turns(32, begun=0, lost=0.2), num_running=32, version=0) == 32


def test_what_an_update_of_the_weights_cleared_is_no_waste():
    limit = ConcurrencyLimit(40, most=1000)
    limit.observe(IDLE, turns(40), num_running=40, version=0)
    assert limit.observe(IDLE, turns(40, lost=1.0), num_running=40, version=1) == 40
    assert limit.observe(IDLE, turns(40, lost=1.0), num_running=40, version=1) == int(40 * 0.85)


def test_bounds_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="at most most=3, got 4"):
        ConcurrencyLimit(1, least=4, most=3)


@pytest.mark.slow
def test_agents_on_a_small_memory_are_collected_about_as_fast_as_with_the_best_number():
    agents = Load((), 400, (12, 0.5), 4, 2000, (1.0, 0.5))
    best = max(run_in_virtual_time(collect(agents, number, 2))["rollouts_per_s"] for number in (30, 40))
    thrashing = run_in_virtual_time(collect(agents, 100, 2))
    found = run_in_virtual_time(collect(agents, None, 2))
    assert thrashing["rollouts_per_s"] < 0.7 * best
    assert found["rollouts_per_s"] > 0.9 * best
    assert found["preemptions_per_rollout"] < 0.5


def is_right():
    return 1.0


class EngineWithLoad(ScriptedEngine):
    """Full as soon as more than ten requests are in flight, of which those beyond are put off."""

    def take_load(self, reader="metrics"):
        beyond = max(0, self.num_in_flight - 10)
        return EngineLoad(min(1.0, self.num_in_flight / 11), beyond, beyond)


def make_collector(engine, renderer, **arguments):
    env = DatasetChatEnv([{"query": "1 + 1 =", "answer": "2"}], repeats=2).append_transform(RubricReward(is_right))
    policy = LLMWrapperBase(engine, renderer=renderer)
    return LLMCollector(env, policy=policy, groups_per_batch=40, **arguments)


@pytest.mark.slow
def test_a_collector_finds_its_number_of_rollouts_while_it_collects(renderer, monkeypatch):
    monkeypatch.setattr("llmrl.collectors.concurrency._LOOK_SECONDS", 0.02)
    engine = EngineWithLoad(["2<|im_end|>"], encode=renderer.encode, latency_s=0.05)
    with make_collector(engine, renderer, max_concurrent_rollouts="auto") as collector:
        assert collector.max_concurrent_rollouts == 32
        assert len(next(iter(collector))) == 80
        deadline = time.monotonic() + 60
        while collector.max_concurrent_rollouts > 16:
            assert time.monotonic() < deadline
            next(iter(collector))


def test_an_engine_that_tells_no_load_is_refused(renderer):
    engine = ScriptedEngine(["2<|im_end|>"], encode=renderer.encode)
    with pytest.raises(
        ValueError, match="an engine that reports its load, such as AsyncVLLM; LLMCollector has Scripted"
    ):
        make_collector(engine, renderer, max_concurrent_rollouts="auto")
    with pytest.raises(TypeError, match="a number, 'auto' or None, got 'most'"):
        make_collector(engine, renderer, max_concurrent_rollouts="most")


def test_a_load_that_cannot_be_read_any_more_ends_the_search_with_a_warning(caplog):
    class Scheduler:
        num_running = max_concurrent_rollouts = 5

    class Source:
        policy_version = 0

        class engine:
            @staticmethod
            def take_load(reader):
                raise RuntimeError("the pipe is broken")

    run_in_virtual_time(asyncio.wait_for(follow_load(Source(), Scheduler(), ConcurrencyLimit(5, most=9)), 60))
    assert "the limit stays at 5 rollouts: RuntimeError: the pipe is broken" in caplog.text
