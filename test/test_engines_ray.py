"""Engines in Ray actors: the same face, and deaths of every kind cost retries only."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time

import pytest
import torch
from weight_sync_tools import log_prob_difference, make_sender

from llmrl.engines import AsyncVLLM, Engine, EngineError, EngineReplicas, SamplingConfig, ScriptedEngine
from llmrl.engines.ray_engine import RayEngine
from llmrl.weight_sync import VLLMWeightSyncScheme

pytest.importorskip("ray")

RAY_OPTIONS = {"num_cpus": 0}
VLLM_OPTIONS = {"max_model_len": 2048, "kv_cache_memory": 1 << 26, "weight_transfer": False}
SAMPLING = SamplingConfig(max_new_tokens=20, ignore_eos=True)


def start_scripted(latency_s=0.5):
    make_engine = functools.partial(ScriptedEngine, [list(range(20))], latency_s=latency_s, max_model_len=100)
    return RayEngine.start(make_engine, ray_options=RAY_OPTIONS)


def wait_until(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def in_actor(ray, engine, function):
    return ray.get(engine._actor.__ray_call__.remote(function))


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


def test_many_requests_are_in_flight_at_once(engine):
    async def run():
        start = time.perf_counter()
        completions = await asyncio.gather(*(engine.generate([5], SAMPLING) for _ in range(200)))
        return len(completions), time.perf_counter() - start

    num_completions, seconds = asyncio.run(run())
    assert num_completions == 200
    assert seconds < 20, "one after another they take 100 s"


def test_abort_and_cancel_reach_the_actor(engine, ray_cluster):
    async def run():
        tasks = [asyncio.create_task(engine.generate([5], SAMPLING, request_id=name)) for name in "ab"]
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
    wait_until(lambda: in_actor(ray_cluster, engine, lambda self: self._engine.num_in_flight) == 0, 5)


def test_pause_resume_and_versions_reach_the_actor(engine):
    async def run():
        await asyncio.to_thread(engine.resume)
        task = asyncio.create_task(engine.generate([5], SAMPLING))
        await asyncio.sleep(0.3)
        engine_version = engine.policy_version
        await asyncio.to_thread(setattr, engine, "policy_version", engine_version + 1)
        return await task

    versions = asyncio.run(run()).versions
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}
    assert engine.policy_version == 1


@pytest.mark.parametrize("victim", ["actor", "actor's process", "engine"])
def test_a_death_costs_retries_only(ray_cluster, victim):
    seen = []
    # Long enough that the death is heard of while every request is in flight, on a busy machine too.
    start = functools.partial(start_scripted, latency_s=1.5)
    with EngineReplicas([start() for _ in range(2)], restart=lambda index: start()) as engines:
        engines.policy_version = 3

        def bring_to_version(engine):
            seen.append((engine is engines[0], engines.serving))
            engine.policy_version = 3

        engines.before_serving.append(bring_to_version)
        first = engines[0]
        pid = in_actor(ray_cluster, first, lambda self: os.getpid())

        async def run():
            tasks = [
                asyncio.create_task(engines.generate([5], SAMPLING, request_id=str(index), routing_key=str(index)))
                for index in range(16)
            ]
            await asyncio.sleep(0.2)
            assert engines.loads == (8, 8)
            if victim == "actor":
                ray_cluster.kill(first._actor)
            elif victim == "engine":
                in_actor(ray_cluster, first, lambda self: self._engine.shutdown())
            else:
                os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(asyncio.gather(*tasks), 60)

        completions = asyncio.run(run())
        assert [completion.token_ids for completion in completions] == [list(range(20))] * 16
        assert {version for completion in completions for version in completion.versions} == {3}
        assert (engines.num_retried, engines.num_deaths) == (8, 1)
        assert (engines.num_in_flight, engines.loads) == (0, (0, 0))
        wait_until(lambda: engines.serving == {0, 1})
        assert seen == [(True, {1})]
        assert asyncio.run(engines[0].generate([5], SAMPLING)).versions == [3] * 20
        wait_until(lambda: not is_running(pid), 20)


def test_a_dead_actor_is_noticed_without_a_request(ray_cluster):
    engine = start_scripted()
    ray_cluster.kill(engine._actor)
    wait_until(lambda: not engine.is_alive, 10)
    with pytest.raises(EngineError, match="dead"):
        asyncio.run(engine.generate([5], SAMPLING))
    with pytest.raises(EngineError, match="dead"):
        engine.pause()
    engine.shutdown()
    engine.shutdown()


def test_what_cannot_start_says_why(ray_cluster, tmp_path):
    with pytest.raises(ValueError, match="script must be"):
        RayEngine.start(functools.partial(ScriptedEngine, "text"), ray_options=RAY_OPTIONS)
    with pytest.raises(ValueError, match="use_ray=True"):
        AsyncVLLM.from_pretrained(tmp_path, ray_options=RAY_OPTIONS)
    with pytest.raises(ValueError, match="num_replicas"):
        AsyncVLLM.from_pretrained(tmp_path, num_replicas=0)


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_in_an_actor_serves_and_a_killed_actor_leaves_no_engine_process(ray_cluster, tiny_model_path):
    pytest.importorskip("vllm")

    def find(self):
        [process] = self._engine._llm.engine_core.resources.engine_manager.processes
        return os.getpid(), process.pid

    options = VLLM_OPTIONS | {"weight_transfer": True}
    with AsyncVLLM.from_pretrained(tiny_model_path, use_ray=True, ray_options=RAY_OPTIONS, **options) as engines:
        [engine] = engines
        pids = in_actor(ray_cluster, engine, find)
        assert all(map(is_running, pids))
        completion = asyncio.run(engines.generate([5, 6, 7], SAMPLING))
        assert len(completion.token_ids) == len(completion.log_probs) == len(completion.versions) == 20
        assert engines.get_tokenizer().decode([0]) == "<|endoftext|>"
        assert engine.reset_prefix_cache()
        with pytest.raises(EngineError, match="cannot open the trainer's memory"):
            engine.init_weight_transfer_engine({"path": "/nowhere", "num_bytes": 64})
        assert_new_weights_arrive(engines, tiny_model_path)
        ray_cluster.kill(engine._actor)
        wait_until(lambda: not any(map(is_running, pids)))
        assert not engine.is_alive


def assert_new_weights_arrive(engines, path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    sender = make_sender(VLLMWeightSyncScheme(), model, engines)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    stale = log_prob_difference(model, engines[0])
    assert sender.update_weights() == 1 == engines.policy_version
    assert log_prob_difference(model, engines[0]) < 0.15 < stale / 2
    sender.shutdown()


@pytest.mark.engine
@pytest.mark.slow
def test_vllm_killed_with_requests_in_flight_comes_back_and_answers_them_all(tiny_model_path):
    pytest.importorskip("vllm")

    def find_pid(engines):
        [process] = engines[0]._llm.engine_core.resources.engine_manager.processes
        return process.pid

    sampling = SamplingConfig(max_new_tokens=1000, ignore_eos=True)
    with AsyncVLLM.from_pretrained(tiny_model_path, num_replicas=1, **VLLM_OPTIONS) as engines:
        first_pid = find_pid(engines)
        with pytest.raises(EngineError, match="weight_transfer=True"):
            engines[0].init_weight_transfer_engine({})

        async def run():
            tasks = [asyncio.create_task(engines.generate([5 + index], sampling)) for index in range(8)]
            await asyncio.sleep(0.3)
            assert engines.loads == (8,)
            os.kill(first_pid, signal.SIGKILL)
            return await asyncio.gather(*tasks)

        completions = asyncio.run(run())
        assert [len(completion.token_ids) for completion in completions] == [1000] * 8
        assert all(len(completion.log_probs) == len(completion.versions) == 1000 for completion in completions)
        assert (engines.num_deaths, engines.num_restarts, engines.num_retried, engines.loads) == (1, 1, 8, (0,))
        second_pid = find_pid(engines)
        assert not is_running(first_pid)
        assert is_running(second_pid)
    wait_until(lambda: not is_running(second_pid), 20)
