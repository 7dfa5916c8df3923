"""A server with the trainer's weights: versions token by token, updates, restarts, what is refused."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_server import VLLMServer, holds, model_of
from waiting import wait_until

from llmrl.cli.doctor import examine_server
from llmrl.engines import EngineError, EngineReplicas, SamplingConfig, ServerEngine
from llmrl.engines.base import UpdatableEngine
from llmrl.engines.server.messages import read_generated
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError

SAMPLING = SamplingConfig(max_new_tokens=4)
ANSWER = {
    "finish_reason": "stop",
    "stop_reason": "###",
    "token_ids": [7, 8, 9],
    "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1}, {"logprob": -0.25}]},
    "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
}


@pytest.fixture
def servers():
    """Starts servers, and ends them."""
    started = []

    def start(*args, **options):
        started.append(VLLMServer(*args, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask(engine, **changes):
    return asyncio.run(engine.generate([1, 2, 3], SAMPLING.with_changes(**changes)))


def make_sender(scheme, weights, engine):
    sender = scheme.create_sender()
    sender.register_model(weights)
    sender.init_all_workers_group(engine=engine)
    return sender


def test_each_token_has_the_version_that_sampled_it(servers):
    server = servers()
    with ServerEngine(server.url, weight_sync=True, vocab_size=50) as engine:
        assert isinstance(engine, UpdatableEngine)
        assert (engine.model_dtype, engine.weight_transfer_backend, engine.num_workers) == (torch.float32, "llmrl", 1)
        server.answer = ANSWER
        completion = ask(engine, stop=("###",))
    assert completion.token_ids == [7, 8, 9]
    assert completion.log_probs == [-0.5, -1.0, -0.25]
    assert completion.versions == [3, 4, 4]
    assert (completion.finish_reason, completion.stop_string) == ("stop", "###")
    parameters = server.bodies[-1]["sampling_params"]
    assert (parameters["detokenize"], parameters["stop"], parameters["max_tokens"]) == (True, ["###"], 4)


def test_what_truncation_kept_is_read_from_log_probs_or_as_the_server_says_it():
    top = [{"token_id": 7, "logprob": -0.5}, {"token_id": 3, "logprob": -1}, {"token_id": 1, "logprob": -9999.0}]
    content = [{"logprob": -0.5, "top_logprobs": top}]
    choice = {"finish_reason": "length", "token_ids": [7], "logprobs": {"content": content},
              "weight_versions": [{"version": "0", "start": 0, "end": 1}]}  # fmt: skip

    def read(top_k=2, **changes):
        [mask] = read_generated({"choices": [choice | changes]}, server="it", budget=4, top_k=top_k).sampling_mask
        return sorted(mask)

    assert read() == [3, 7]
    assert read(sampling_mask=[[2, 5, 7]]) == [2, 5, 7]
    with pytest.raises(EngineError, match="may tie"):
        read(top_k=1)


@given(st.sampled_from(sorted(ANSWER)), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["version", "start", "end", "content", "logprob", "x"]), inner, max_size=3),
))  # fmt: skip
def test_an_answer_of_any_shape_is_a_completion_or_refused(name, value):
    for answer in ({"choices": [ANSWER | {name: value}]}, {"choices": value}, value):
        try:
            completion = read_generated(answer, server="it", budget=4, vocab_size=50, top_k=None)
        except EngineError:
            continue
        assert len(completion.token_ids) == len(completion.log_probs) == len(completion.versions) <= 4
        assert all(math.isfinite(log_prob) for log_prob in completion.log_probs)


def test_a_request_that_is_ended_returns_what_it_has(servers):
    server = servers()
    server.is_held = True
    with ServerEngine(server.url, weight_sync=True) as engine:

        async def run():
            task = asyncio.create_task(engine.generate([1], SAMPLING, request_id="mine"))
            while server.calls[-1] != "inference/v1/generate" or not server.bodies[-1]:
                await asyncio.sleep(0.01)
            await engine.abort("mine")
            return await task

        completion = asyncio.run(run())
    assert (completion.token_ids, completion.versions, completion.finish_reason) == ([7], [0], "abort")


@pytest.mark.parametrize("backend", ["llmrl", "llmrl by files", None])
def test_weights_arrive_while_the_server_is_paused_and_are_labelled(servers, tmp_path, backend):
    server = servers(backend and "llmrl", device="cuda")
    server.resets_old_connections = True
    weights = model_of(1)
    is_file = backend != "llmrl"
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)) if is_file else VLLMWeightSyncScheme()
    with ServerEngine(server.url, weight_sync=True) as engine:
        sender = make_sender(scheme, weights, engine)
        for value in (2, 3):
            for tensor, new in zip(weights.values(), model_of(value).values(), strict=True):
                tensor.copy_(new)
            server.calls.clear()
            assert sender.update_weights() == value - 1
            loads = "collective_rpc" if backend is None else "finish_weight_update"
            order = [server.calls.index(name) for name in ("pause", loads, "reset_prefix_cache", "resume")]
            assert order == sorted(order)
            assert holds(server, value)
            assert server.label == str(value - 1)
            assert ask(engine).versions == [value - 1] * 2
        sender.shutdown()
    with ServerEngine(server.url, weight_sync=True) as again:
        assert again.policy_version == 2, "a server outlives its trainer and knows its weights"


@pytest.mark.parametrize("backend", ["llmrl", None])
def test_weights_of_another_trainer_are_loaded_though_their_version_is_that_of_the_server(servers, tmp_path, backend):
    server = servers(backend)
    for value in (1, 2):  # each trainer counts from 1 in its own folder
        scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / str(value)))
        with ServerEngine(server.url, weight_sync=True) as engine:
            writer, reader = make_sender(scheme, model_of(value), None), scheme.create_receiver(engine)
            assert writer.update_weights() == reader.poll_and_apply() == 1
            assert (holds(server, value), server.label, server.is_paused) == (True, "1", False)
            writer.shutdown()
            reader.shutdown()


@pytest.mark.parametrize(("backend", "fails_at"), [("llmrl", "update_weights"), (None, "pause")])
def test_an_update_that_fails_before_it_is_loaded_leaves_the_old_weights(servers, tmp_path, backend, fails_at):
    server = servers(backend)
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)) if backend is None else VLLMWeightSyncScheme()
    with ServerEngine(server.url, weight_sync=True) as engine:
        sender = make_sender(scheme, model_of(1), engine)
        sender.update_weights()
        server.fails_at = fails_at
        with pytest.raises((WeightSyncError, EngineError), match="went wrong"):
            sender.update_weights(model_of(2))
        server.fails_at = None
        assert holds(server, 1)
        assert ask(engine).versions == [1, 1]
        sender.update_weights(model_of(3))
        assert holds(server, 3)
        sender.shutdown()


def test_a_server_that_fails_to_load_stays_paused_until_an_update_succeeds(servers, tmp_path):
    server = servers(None)
    with ServerEngine(server.url, weight_sync=True) as engine:
        sender = make_sender(VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)), model_of(1), engine)
        sender.update_weights()
        server.fails_at = "collective_rpc"
        with pytest.raises(WeightSyncError, match="stay paused"):
            sender.update_weights(model_of(2))
        assert server.is_paused
        server.fails_at = None
        sender.update_weights(model_of(3))
        assert (server.is_paused, holds(server, 3)) == (False, True)
        sender.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["llmrl", None])
def test_a_server_that_was_started_again_serves_with_the_current_weights_only(servers, tmp_path, backend):
    """One of two is killed and comes back with its first weights; no token of those is delivered."""
    here, there = servers(backend), servers(backend)
    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)) if backend is None else VLLMWeightSyncScheme()
    with EngineReplicas([ServerEngine(server.url, weight_sync=True) for server in (here, there)]) as engines:
        sender = make_sender(scheme, model_of(1), engines)
        assert sender.update_weights(model_of(5)) == 1

        async def many():
            return await asyncio.gather(*(engines.generate([1], SAMPLING) for _ in range(8)))

        here.close()
        assert {version for completion in asyncio.run(many()) for version in completion.versions} == {1}
        assert engines.serving == {1}
        back = servers(backend, port=here.port)
        wait_until(lambda: engines.serving == {0, 1})
        assert holds(back, 5)
        assert {version for completion in asyncio.run(many()) for version in completion.versions} == {1}
        assert set(back.served) == {"1"}
        assert sender.update_weights(model_of(6)) == 2
        assert holds(back, 6)
        assert holds(there, 6)
        sender.shutdown()


@pytest.mark.slow
def test_an_unnoticed_restart_is_recognised_by_the_label_of_the_tokens(servers):
    """The server is back before anybody asks: its tokens are refused, and its version is not the current one."""
    server = servers()
    with EngineReplicas([ServerEngine(server.url, weight_sync=True)], num_retries=0) as engines:
        sender = make_sender(VLLMWeightSyncScheme(), model_of(1), engines)
        sender.update_weights()
        server.restart()
        with pytest.raises(EngineError, match="was restarted"):
            ask(engines)
        wait_until(lambda: engines.serving == {0})
        assert holds(server, 1)
        assert ask(engines).versions == [1, 1]
        assert engines[0].num_restarts == 1
        sender.shutdown()


@pytest.mark.slow
def test_a_single_server_that_lost_its_weights_refuses_until_the_next_update(servers):
    server = servers()
    with ServerEngine(server.url, weight_sync=True) as engine:
        sender = make_sender(VLLMWeightSyncScheme(), model_of(1), engine)
        sender.update_weights()
        server.restart()
        with pytest.raises(EngineError, match="was restarted"):
            ask(engine)
        wait_until(lambda: engine.is_alive)
        with pytest.raises(EngineError, match="lost the weights"):
            ask(engine)
        assert sender.update_weights() == 2, "the versions go on"
        assert ask(engine).versions == [2, 2]
        sender.shutdown()


def test_what_a_dead_trainer_left_unfinished_is_ended_first(servers):
    server = servers()
    server.is_paused = server.is_updating = True
    server.taken, server.label = model_of(9), "7"
    with ServerEngine(server.url, weight_sync=True) as engine:
        with pytest.raises(EngineError, match="after the next update"):
            ask(engine)
        sender = make_sender(VLLMWeightSyncScheme(), model_of(1), engine)
        assert sender.update_weights() == 8
        assert holds(server, 1)
        assert ask(engine).versions == [8, 8]
        sender.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_dev": False}, "VLLM_SERVER_DEV_MODE=1"),
        ({"is_scaled_out": False}, "--enable-scale-out"),
        (
            {"backend": None, "device": "cpu", "parameters": ["model.embed_tokens.weight"]},
            "ties its head to its embedding",
        ),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_with_the_options_it_lacks(servers, options, message):
    server = servers(**options)
    with pytest.raises(EngineError, match=message):
        ServerEngine(server.url, weight_sync=True)
    with ServerEngine(server.url) as engine, pytest.raises(ValueError, match="weight_sync=True"):
        make_sender(VLLMWeightSyncScheme(), model_of(1), engine)


def test_an_untied_head_on_a_cpu_is_no_hindrance_and_streams_are_refused_for_files(servers):
    server = servers(None, device="cpu", parameters=["model.embed_tokens.weight", "lm_head.weight"])
    with ServerEngine(server.url, weight_sync=True) as engine:
        assert engine.weight_transfer_backend == "files"
        with pytest.raises(ValueError, match="VLLMDoubleBufferSyncScheme"):
            make_sender(VLLMWeightSyncScheme(), model_of(1), engine)


@pytest.mark.slow
def test_a_server_that_is_being_started_is_waited_for(servers):
    with pytest.raises(EngineError, match="cannot be reached"):
        ServerEngine("http://127.0.0.1:9", start_timeout_seconds=0.1)
    server = servers()
    server.close()
    starting = threading.Timer(0.3, lambda: servers(port=server.port))
    starting.start()
    with ServerEngine(server.url, weight_sync=True, start_timeout_seconds=60) as engine:
        assert engine.is_alive


@pytest.mark.parametrize(
    ("options", "states", "words"),
    [
        ({}, ["good", "good", "good", "note"], "shared memory, gloo or files"),
        ({"backend": None}, ["good", "good", "good", "note"], "taken from files"),
        ({"is_scaled_out": False}, ["good", "good", "note"], "--enable-scale-out"),
        ({"is_dev": False}, ["good", "good", "note"], "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_the_doctor_says_what_a_server_can_do(servers, options, states, words):
    server = servers(**options)
    findings = examine_server(server.url)
    assert [finding.state for finding in findings] == states
    assert any(words in f"{finding.found} {finding.advice}" for finding in findings)
    server.close()
    [finding] = examine_server(server.url)
    assert (finding.state, "cannot be reached" in finding.found) == ("wrong", True)
