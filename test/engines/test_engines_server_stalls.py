"""Servers that stop answering in an update: what waits for them ends, and they serve again when they answer again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile

import pytest
from fuzzing import fuzz_seeds
from vllm_server import VLLMServer, holds, model_of
from waiting import wait_until

from llmrl.engines import EngineError, EngineReplicas, SamplingConfig, ServerEngine
from llmrl.engines.server import engine as server
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme

pytestmark = pytest.mark.usefixtures("takes_long")

SAMPLING = SamplingConfig(max_new_tokens=4)
ROUTES = [
    "pause",
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "reset_prefix_cache",
    "resume",
]
FILE_ROUTES = ["pause", "collective_rpc", "update_weight_version", "reset_prefix_cache", "resume"]
CASES = [("llmrl", route) for route in ROUTES] + [(None, route) for route in FILE_ROUTES]


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Ends what it began before; starts servers, their engines, and a sender whose first update gave them version 1."""
    monkeypatch.setattr(server, "PROBE_INTERVAL_S", 0.02)
    ended = []

    def end():
        for one in ended:
            if isinstance(one, VLLMServer):
                one.is_stalled = False
        while ended:
            one = ended.pop()
            if isinstance(one, VLLMServer):
                one.close()
            else:
                one.shutdown()

    def start(backend, *, num_servers=2, replicas=True):
        end()
        servers = [VLLMServer(backend) for _ in range(num_servers)]
        ended.extend(servers)
        engines = [ServerEngine(one.url, weight_sync=True) for one in servers]
        together = EngineReplicas(engines) if replicas else engines[0]
        folder = tempfile.mkdtemp(dir=tmp_path)
        scheme = VLLMWeightSyncScheme() if backend else VLLMDoubleBufferSyncScheme(remote_addr=folder)
        sender, weights = scheme.create_sender(), model_of(1)
        sender.register_model(weights)
        sender.init_all_workers_group(engine=together)
        ended.extend([*engines, together, sender])
        assert sender.update_weights() == 1
        return servers, together, sender, weights

    yield start
    end()


def set_to(weights, value):
    for tensor, new in zip(weights.values(), model_of(value).values(), strict=True):
        tensor.copy_(new)


def go_on(one, engine):
    """Answer again, within the time that an answer takes on a loaded machine."""
    limit(engine, 60)
    one.stalls_at, one.is_stalled = None, False


def ask(engine):
    return asyncio.run(engine.generate([1, 2, 3], SAMPLING))


def limit(engine, seconds):
    engine.control_timeout_seconds = engine.reply_timeout_seconds = seconds


def stall_at(one, route, engine):
    """Stall at the route in the next update; only an engine that is new to the update is reached first."""
    one.stalls_at = route
    limit(engine, 0.3)
    if route == "init_weight_transfer_engine":
        engine.num_restarts += 1


@pytest.mark.parametrize(("backend", "route"), CASES)
def test_an_update_goes_on_without_a_server_that_stalls_and_takes_it_back(begin, backend, route):
    (first, second), engines, sender, weights = begin(backend)
    stall_at(first, route, engines[0])
    set_to(weights, 5)
    assert sender.update_weights() == 2
    assert holds(second, 5) and not second.is_paused
    go_on(first, engines[0])
    wait_until(lambda: engines.serving == {0, 1})
    assert holds(first, 5) and not first.is_paused
    assert first.label == "2"
    assert {version for _ in range(4) for version in ask(engines).versions} == {2}
    set_to(weights, 6)
    assert sender.update_weights() == 3
    assert holds(first, 6) and holds(second, 6)


@pytest.mark.parametrize(("backend", "route"), CASES)
def test_the_only_server_that_stalls_fails_the_update_and_the_next_one_reaches_it(begin, backend, route):
    [only], engine, sender, weights = begin(backend, num_servers=1, replicas=False)
    stall_at(only, route, engine)
    set_to(weights, 5)
    with pytest.raises(EngineError, match="did not answer within"):
        sender.update_weights()
    go_on(only, engine)
    wait_until(lambda: engine.is_alive)
    if engine.lacks_weights:
        for asked in (ask, lambda engine: asyncio.run(engine.score([1, 2, 3]))):
            with pytest.raises(EngineError, match="serves after the next update"):
                asked(engine)
    else:
        assert set(ask(engine).versions) <= {1, 2} and not only.is_paused
        assert holds(only, {"1": 1, "2": 5}[only.label])
    set_to(weights, 6)
    version = sender.update_weights()
    assert holds(only, 6) and ask(engine).versions == [version] * 2 and not only.is_paused


def test_a_failed_update_gives_a_server_that_lost_its_weights_no_label_for_them(begin):
    (first, second), _, sender, weights = begin("llmrl")
    first.restart()  # which is not noticed yet
    second.fails_at = "update_weights"
    set_to(weights, 5)
    with pytest.raises(EngineError):
        sender.update_weights()
    assert first.label == "default" and not first.weights
    second.fails_at = None
    assert sender.update_weights() == 2
    assert holds(first, 5) and holds(second, 5) and first.label == second.label == "2"


def test_a_server_that_stalls_while_it_is_opened_is_refused(begin, monkeypatch):
    (one, _), *_ = begin("llmrl")
    monkeypatch.setattr(ServerEngine, "control_timeout_seconds", 0.3)
    for route in ("server_info", "get_world_size", "weight_info", "is_paused"):
        one.stalls_at = route
        with pytest.raises(EngineError, match="did not answer within"):
            ServerEngine(one.url, weight_sync=True)
        one.stalls_at, one.is_stalled = None, False


def test_requests_of_a_server_that_hangs_go_elsewhere_and_it_serves_again_when_it_answers(begin):
    _, engines, *_ = begin("llmrl")
    for engine in engines:
        engine.reply_timeout_seconds = None
    engines.replace_hanging(engines[0])
    assert not engines[0].is_alive
    wait_until(lambda: engines.serving == {0, 1})
    assert ask(engines).versions == [1, 1]


@pytest.mark.parametrize("backend", ["llmrl", None])
def test_versions_stay_those_of_their_weights_whichever_servers_stall_or_restart(begin, backend):
    for seed in fuzz_seeds(2):
        chance = random.Random(seed)
        servers, engines, sender, weights = begin(backend)
        for engine in engines:
            limit(engine, 0.3)
        sent = {"1": 1}
        for value in range(2, 2 + chance.randrange(1, 7)):
            update_at_random(chance, servers, sender, weights, value, sent)
        for one, engine in zip(servers, engines, strict=True):
            go_on(one, engine)  # the last update must reach both
            one.fails_at = None
        wait_until(lambda engines=engines: all(engine.is_alive for engine in engines), timeout_s=120)
        set_to(weights, 20)
        version = sender.update_weights()
        wait_until(lambda engines=engines: engines.serving == {0, 1}, timeout_s=120)
        assert all(holds(one, 20) and one.label == str(version) and not one.is_paused for one in servers), seed
        assert ask(engines).versions == [version] * 2


def update_at_random(chance, servers, sender, weights, value, sent):
    """Let servers stall, refuse or start again, and send; what was sent is noted by its version."""
    set_to(weights, value)
    for one in servers:
        if chance.random() < 0.3:
            one.stalls_at = chance.choice([*ROUTES, *FILE_ROUTES, "weight_info"])
        elif chance.random() < 0.2:
            one.fails_at = chance.choice([*ROUTES, *FILE_ROUTES])
        elif chance.random() < 0.15:
            one.restart()
    with contextlib.suppress(EngineError):
        sent[str(sender.update_weights())] = value
    for one in servers:
        one.fails_at = None
        if chance.random() < 0.7:
            one.stalls_at, one.is_stalled = None, False
        if not one.is_paused and not one.is_stalled and one.label in sent:
            assert holds(one, sent[one.label]), (one.label, sent, one.weights)
