"""Engines in Ray actors: the same face, and deaths of every kind cost retries only."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import signal
import time

import pytest
import torch
from waiting import begin, is_running, wait_until

from llmrl.engines import Engine, EngineError, EngineReplicas, SamplingConfig, TokenScores
from llmrl.engines.base import check_supported
from llmrl.engines.ray.engine import RayEngine
from llmrl.engines.token_stream import TokenStream
from llmrl.testing import ScriptedEngine

pytest.importorskip("ray")

RAY_OPTIONS = {"num_cpus": 0}
VLLM_OPTIONS = {"max_model_len": 2048, "kv_cache_memory": 1 << 26, "cpu_threads": 1, "weight_transfer": False}
SAMPLING = SamplingConfig(max_new_tokens=20, ignore_eos=True)


SLOW, ENDLESS, QUICK = 6, 7, 8
"""A prompt of one of these tokens takes seconds, or an hour, so that what happens meanwhile does so
on a busy machine too; or no time."""


def start_scripted(latency_s=0.5, ray_options=RAY_OPTIONS):
    def latency(prompt_ids, token_ids):
        return {SLOW: 4.0, ENDLESS: 3600.0, QUICK: 0.0}.get(prompt_ids[0], latency_s)

    make_engine = functools.partial(ScriptedEngine, [list(range(20))], latency_s=latency, max_model_len=100)
    return RayEngine.start(make_engine, ray_options=ray_options)


def in_actor(ray, engine, function):
    return ray.get(engine.actor.__ray_call__.remote(function))


@pytest.fixture(scope="module")
def engine(ray_cluster):
    engine = start_scripted()
    yield engine
    engine.shutdown()


def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine)
    assert engine.is_alive
    assert (engine.max_model_len, engine.host) == (100, os.uname().nodename)
    with pytest.raises(TypeError, match="cannot be pickled"):
        engine.__reduce__()


def test_completions_arrive_whole_and_refusals_are_those_of_the_engine(engine):
    completion = asyncio.run(engine.generate([5], SAMPLING))
    assert completion.token_ids == list(range(20))
    assert len(completion.log_probs) == len(completion.versions) == 20
    with pytest.raises(ValueError, match="100"):
        asyncio.run(engine.generate([5] * 100, SAMPLING))
    assert engine.is_alive


def test_grammars_are_followed_and_checked_where_the_engine_is(engine):
    class RefusingEngine(ScriptedEngine):
        """Refuses a grammar that is not JSON, as xgrammar does."""

        def check_sampling(self, sampling):
            json.loads(sampling.grammar)

    class GrammarlessEngine(ScriptedEngine):
        takes_grammars = False

    assert engine.takes_grammars
    refusing = RayEngine.start(functools.partial(RefusingEngine, [[1]]), ray_options=RAY_OPTIONS)
    refusing.check_sampling(SamplingConfig(grammar="{}"))
    with pytest.raises(ValueError, match="Expecting value"):
        refusing.check_sampling(SamplingConfig(grammar="no JSON"))
    grammarless = RayEngine.start(functools.partial(GrammarlessEngine, [[1]]), ray_options=RAY_OPTIONS)
    with pytest.raises(ValueError, match="sample from AsyncVLLM"):
        check_supported(EngineReplicas([engine, grammarless]), SamplingConfig(grammar="{}"))
    for one in (refusing, grammarless):
        one.shutdown()


def start_scoring():
    class ScoringEngine(ScriptedEngine):
        """Says of each token its own number as a log-prob, of the first that it waits."""

        async def score(self, token_ids, *, top_k=0):
            if token_ids[0] == 0:
                raise ValueError("0 is refused")
            if token_ids[0] == 1:
                await asyncio.sleep(3600)
            ids = torch.tensor(token_ids)
            return TokenScores(-ids.float(), ids[:, None].expand(-1, top_k), -ids[:, None].float().expand(-1, top_k))

    return RayEngine.start(lambda: ScoringEngine([[1]]), ray_options=RAY_OPTIONS)


def test_given_tokens_are_scored_in_the_actor_and_by_another_where_it_dies(engine, ray_cluster):
    with pytest.raises(TypeError, match="the engine in the actor does not score given tokens"):
        asyncio.run(engine.score([5, 6]))

    async def run(engines):
        with pytest.raises(ValueError, match="0 is refused"):
            await engines[0].score([0, 5])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engines[0].score([1, 5]), 0.2)
        assert engines[0].num_in_flight == 0
        task = asyncio.create_task(engines.score([1, 7]))
        while not any(one.num_in_flight for one in engines):
            await asyncio.sleep(0.01)
        place = engines.loads.index(1)
        ray_cluster.kill(engines[place].actor)
        while not engines[1 - place].num_in_flight:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        assert (engines.num_retried, engines.num_deaths, engines.loads) == (1, 1, (0, 0))
        return await engines.score([2, 7], top_k=3)

    with EngineReplicas([start_scoring() for _ in range(2)]) as engines:
        scores = asyncio.run(run(engines))
        assert scores.log_probs.tolist() == [-2.0, -7.0]
        assert scores.top_ids.tolist() == [[2] * 3, [7] * 3]
        assert torch.equal(scores.top_log_probs, -scores.top_ids.float())
        assert sum(one.num_in_flight for one in engines) == 0


def test_many_requests_are_in_flight_at_once(engine):
    async def run():
        start = time.perf_counter()
        completions = await asyncio.gather(*(engine.generate([5], SAMPLING) for _ in range(200)))
        return len(completions), time.perf_counter() - start

    num_completions, seconds = asyncio.run(run())
    assert num_completions == 200
    assert seconds < 100, "one after another they take 100 s"


def test_abort_and_cancel_reach_the_actor(engine, ray_cluster):
    async def run():
        tasks = [asyncio.create_task(engine.generate([ENDLESS], SAMPLING, request_id=name)) for name in "ab"]
        await asyncio.sleep(0.2)
        with pytest.raises(ValueError, match="in flight"):
            await engine.generate([5], SAMPLING, request_id="a")
        await engine.abort("a")
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    aborted, cancelled = asyncio.run(run())
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) == len(aborted.log_probs) < 20
    assert isinstance(cancelled, asyncio.CancelledError)
    assert engine.num_in_flight == 0
    wait_until(lambda: in_actor(ray_cluster, engine, lambda self: self._engine.num_in_flight) == 0)


class Watched(TokenStream):
    """Keeps each report, and stops the request at `num_wanted` tokens."""

    def __init__(self, num_wanted=math.inf):
        super().__init__(lambda: None)
        self.reports, self.num_wanted = [], num_wanted

    def report(self, token_ids):
        super().report(token_ids)
        self.reports.append(token_ids)
        self.is_stopped = len(token_ids) >= self.num_wanted


@pytest.mark.parametrize("num_wanted", [math.inf, 5])
def test_tokens_are_reported_while_the_actor_samples_and_a_stop_reaches_it(engine, num_wanted):
    async def run():
        stream = Watched(num_wanted)
        return stream, await engine.generate([SLOW], SAMPLING, stream=stream)

    stream, completion = asyncio.run(run())
    assert engine.streams_tokens and len(stream.reports) > 2
    assert all(ids == list(range(len(ids))) for ids in [*stream.reports, completion.token_ids])
    sizes = [len(ids) for ids in stream.reports]
    assert sizes == sorted(set(sizes)) and sizes[0] < 20
    assert completion.finish_reason == ("stop" if num_wanted == math.inf else "abort")
    assert len(completion.token_ids) == 20 if num_wanted == math.inf else sizes[-1] <= len(completion.token_ids) < 20


def test_a_stream_that_is_refused_cancelled_or_whose_actor_dies_says_so(ray_cluster):
    one = start_scripted()

    async def run():
        with pytest.raises(ValueError, match="100"):
            await one.generate([5] * 100, SAMPLING, stream=Watched())
        cancelled = asyncio.create_task(one.generate([ENDLESS], SAMPLING, stream=Watched()))
        await asyncio.sleep(0.2)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        while in_actor(ray_cluster, one, lambda self: self._engine.num_in_flight):
            await asyncio.sleep(0.02)
        killed = asyncio.create_task(one.generate([SLOW], SAMPLING, stream=(stream := Watched())))
        while not stream.reports:
            await asyncio.sleep(0.01)
        ray_cluster.kill(one.actor)
        with pytest.raises(EngineError, match="died"):
            await killed
        return one.num_in_flight

    assert asyncio.run(run()) == 0
    assert not one.is_alive


def test_requests_of_two_processes_with_one_id_are_two(engine, ray_cluster):
    other = RayEngine.reach(engine.notice())  # as a collector that takes a killed one's place

    async def run():
        tasks = [asyncio.create_task(one.generate([5], SAMPLING, request_id="same")) for one in (engine, other)]
        await asyncio.sleep(0)
        await other.abort("same")
        aborted = await tasks[1]
        await asyncio.to_thread(engine.resume)
        return await tasks[0], aborted

    in_actor(ray_cluster, engine, lambda self: self._engine.pause())  # neither request can end before the abort
    whole, aborted = asyncio.run(run())
    assert (whole.finish_reason, aborted.finish_reason) == ("stop", "abort")


def test_pause_resume_and_versions_reach_the_actor(engine):
    async def run():
        await asyncio.to_thread(engine.resume)
        task = await begin(engine, [SLOW], SAMPLING)
        engine_version = engine.policy_version
        await asyncio.to_thread(setattr, engine, "policy_version", engine_version + 1)
        return await task

    versions = asyncio.run(run()).versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert engine.policy_version == 1


def test_deaths_of_every_kind_cost_retries_only(engine, ray_cluster, ray_nodes):
    # Long enough that every request is in flight until its engine dies, on a busy machine too.
    start = functools.partial(start_scripted, latency_s=30.0)
    away = ray_nodes.add_node(num_cpus=0, resources={"away": 1})
    first = start(ray_options={"num_cpus": 0, "resources": {"away": 1}})
    engines = EngineReplicas([first, engine], restart=lambda index: start(), hang_timeout_seconds=5.0)
    engines.policy_version = 3
    seen = []

    def bring_to_version(engine):
        seen.append((engine is engines[0], engines.serving))
        engine.policy_version = 3

    engines.before_serving.append(bring_to_version)

    def end(victim, pid):
        if victim == "node":
            ray_nodes.remove_node(away, allow_graceful=False)
        elif victim == "actor's process":
            os.kill(pid, signal.SIGKILL)
        elif victim == "engine":
            in_actor(ray_cluster, engines[0], lambda self: self._engine.shutdown())
        else:
            in_actor(ray_cluster, engines[0], lambda self: self._engine.hang())

    async def run(victim, pid):
        tasks = [
            asyncio.create_task(engines.generate([5], SAMPLING, request_id=f"{victim}-{index}")) for index in range(16)
        ]
        while sum(engines.loads) < 16:
            await asyncio.sleep(0)
        assert engines.loads == (8, 8)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(end, victim, pid)
        return await asyncio.gather(*tasks)

    for num_deaths, victim in enumerate(("node", "actor's process", "engine", "hanging engine"), 1):
        dying = engines[0]
        pid = in_actor(ray_cluster, dying, lambda self: os.getpid())
        completions = asyncio.run(run(victim, pid))
        assert [completion.token_ids for completion in completions] == [list(range(20))] * 16
        assert {version for completion in completions for version in completion.versions} == {3}
        assert (engines.num_retried, engines.num_deaths) == (8 * num_deaths, num_deaths)
        assert engines.loads == (0, 0)
        wait_until(lambda: engines.serving == {0, 1})
        assert seen == [(True, {1})] * num_deaths
        assert not dying.is_alive
        with pytest.raises(EngineError, match="dead"):
            asyncio.run(dying.generate([5], SAMPLING))
        with pytest.raises(EngineError, match="dead"):
            dying.pause()
        wait_until(lambda pid=pid: not is_running(pid))
        # One that serves has made up for its deaths.
        assert asyncio.run(engines.generate([QUICK], SAMPLING, routing_key=victim)).versions == [3] * 20
        assert engines.router.assign("later", victim) == 0
        engines.router.release("later")
    assert engines.num_hangs == 1
    last = engines[0]
    last.shutdown()
    last.shutdown()


def test_what_cannot_start_says_why(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match="script must be"):
        RayEngine.start(functools.partial(ScriptedEngine, "text"), ray_options=RAY_OPTIONS)
    with pytest.raises(ValueError, match="use_ray=True"):
        EngineReplicas.from_pretrained(tmp_path, ray_options=RAY_OPTIONS)
    with pytest.raises(ValueError, match="ray_init_config has no effect"):
        EngineReplicas.from_pretrained(tmp_path, ray_init_config={"address": "auto"})
    with pytest.raises(ValueError, match="num_replicas"):
        EngineReplicas.from_pretrained(tmp_path, num_replicas=0)
    with pytest.raises(TypeError, match=r"no argument 'max_num_seq'.*'max_num_seqs'"):
        EngineReplicas.from_pretrained(tmp_path, use_ray=True, max_num_seq=1)
    with pytest.raises(RuntimeError, match="connected to"):
        EngineReplicas.from_pretrained(tmp_path, use_ray=True, ray_init_config={"address": "192.0.2.1:6379"})


def test_vllm_that_hangs_with_requests_in_flight_is_replaced_and_answers_them_all(tiny_model_path, real_vllm):
    def find_pid(engines):
        [process] = engines[0].llm.engine_core.resources.engine_manager.processes
        return process.pid

    sampling = SamplingConfig(max_new_tokens=1000, ignore_eos=True)
    options = {**VLLM_OPTIONS, "hang_timeout_seconds": 5.0}
    with EngineReplicas.from_pretrained(tiny_model_path, **options) as engines:
        first_pid = find_pid(engines)
        with pytest.raises(EngineError, match="weight_transfer=True"):
            engines[0].init_weight_transfer_engine({})
        assert asyncio.run(engines[0].progress()) is None

        async def run():
            tasks = [asyncio.create_task(engines.generate([5 + index], sampling)) for index in range(8)]
            while not await engines[0].progress():
                await asyncio.sleep(0.005)
            assert engines.loads == (8,)
            os.kill(first_pid, signal.SIGSTOP)
            assert engines.is_alive
            return await asyncio.gather(*tasks)

        completions = asyncio.run(run())
        assert [len(completion.token_ids) for completion in completions] == [1000] * 8
        assert all(len(completion.log_probs) == len(completion.versions) == 1000 for completion in completions)
        assert (engines.num_hangs, engines.num_restarts, engines.num_retried, engines.loads) == (1, 1, 8, (0,))
        second_pid = find_pid(engines)
        assert not is_running(first_pid)
        assert is_running(second_pid)
    wait_until(lambda: not is_running(second_pid))
