"""What engines say of how hard they work, against plain sums."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from llmrl.engines.load import EngineLoad, LoadMeter, take_load

COUNTS = st.integers(0, 50)
STEPS = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9), st.integers(0, 3), *[COUNTS] * 4), max_size=6)


def record(meter, steps):
    for used, waiting, preempted, queries, hits, drafted, accepted in steps:
        scheduler = SimpleNamespace(
            kv_cache_usage=used,
            num_waiting_reqs=waiting,
            prefix_cache_stats=SimpleNamespace(queries=queries, hits=hits),
            spec_decoding_stats=SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted),
        )
        meter.record(scheduler, SimpleNamespace(num_preempted_reqs=preempted), mm_cache_stats=None, engine_idx=0)
        meter.record(None, None)  # of what is no step of the scheduler's


class Engine:
    is_alive = True

    def __init__(self, steps):
        self.meter = LoadMeter()
        record(self.meter, steps)

    def take_load(self, reader="metrics"):
        return self.meter.take(reader)


@given(STEPS, STEPS)
def test_loads_of_steps_and_of_engines_are_maxima_and_sums(first, second):
    dead = SimpleNamespace(is_alive=False)
    load = take_load([Engine(first), dead, Engine(second), SimpleNamespace(is_alive=True)])
    steps = first + second
    used, waiting, *counts = zip(*steps, strict=True) if steps else ((),) * 7
    assert load == EngineLoad(max(used, default=0), max(waiting, default=0), *map(sum, counts))


@given(STEPS)
def test_a_load_is_reported_once(steps):
    engine = Engine(steps)
    take_load(engine)
    assert engine.take_load() == EngineLoad()


def test_a_load_that_is_read_while_a_step_is_added_is_counted_once(monkeypatch):
    meter = LoadMeter()
    joined, is_joining, taken = EngineLoad.joined, threading.Event(), []

    def join_slowly(load, step):
        is_joining.set()
        reading.join(0.2)  # as long as it may take a reader to come in between
        return joined(load, step)

    def read():
        is_joining.wait()
        taken.append(meter.take())

    step = [(0.5, 1, 1, 8, 4, 0, 0)]
    record(meter, step)
    monkeypatch.setattr(EngineLoad, "joined", join_slowly)
    reading = threading.Thread(target=read)
    reading.start()
    record(meter, step)
    reading.join()
    assert taken[0].num_preemptions + meter.take().num_preemptions == 2


@given(STEPS, STEPS)
def test_each_reader_gets_all_since_its_own_last_call(first, second):
    engine = Engine([])
    assert take_load(engine, "other") == EngineLoad()
    record(engine.meter, first)
    of_first = take_load(engine, "other")
    record(engine.meter, second)
    assert of_first == Engine(first).take_load()
    assert take_load(engine, "other") == Engine(second).take_load()
    assert take_load(engine) == Engine(first + second).take_load()
