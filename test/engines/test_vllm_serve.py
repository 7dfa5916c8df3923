"""A real `vllm serve`, in a process of its own; its weights are replaced over HTTP by every way that a CPU has."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from waiting import wait_until
from warm_processes import WarmPopen
from weight_sync_tools import (
    SAMPLING,
    assert_each_weight_arrives,
    differences_of,
    log_prob_difference,
    make_sender,
    out_of_reach,
    set_noisy,
    sharp_llama,
    weights_of,
)

from llmrl.engines import EngineError, EngineReplicas, SamplingConfig, ServerEngine
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError

# Mean absolute difference of log-probs from the model's: 0.005 of this model, which is very sure of its tokens.
MEAN_TOLERANCE = 0.05
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


HELD = []


def free_port():
    """A port that no other program is given: it stays bound here, where the server may listen."""
    HELD.append(socket.socket())
    HELD[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    HELD[-1].bind(("127.0.0.1", 0))
    return HELD[-1].getsockname()[1]


def start_server(path, port, *options, **variables):
    """A server of the model in a folder, in a process of its own."""
    # The server's command is a script of vLLM's package, which is not found by that name where it is built for a CPU.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--skip-tokenizer-init",
        "--enforce-eager", "--block-size", "32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--distributed-executor-backend", "uni", *options,
    ]  # fmt: skip
    environ = os.environ | VARIABLES | variables
    with (path / "log").open("w") as log:
        return WarmPopen(command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def kill(process):
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def served(real_vllm, tmp_path_factory):
    """A model with a tied head, and the address of a server of it."""
    path, port = tmp_path_factory.mktemp("served"), free_port()
    model = sharp_llama(path)
    process = start_server(path, port, "--weight-transfer-config", '{"backend": "llmrl"}')
    yield model, f"http://127.0.0.1:{port}", process
    kill(process)


def test_it_scores_the_tokens_that_it_is_given(served):
    model, url, _ = served
    ids = [1, 493, 198, 148, 314, 7]
    with ServerEngine(url, start_timeout_seconds=240) as engine:
        scores = asyncio.run(engine.score(ids, top_k=3))
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    tolerance = {"rtol": 0, "atol": MEAN_TOLERANCE}
    torch.testing.assert_close(scores.log_probs[1:], log_p.gather(1, torch.tensor(ids)[1:, None])[:, 0], **tolerance)
    torch.testing.assert_close(scores.top_log_probs[1:], log_p.topk(3).values, **tolerance)


def test_conversations_go_on_while_a_server_takes_weights_by_memory_gloo_and_files(served, tmp_path, monkeypatch):
    """Every parameter changes, the tied embedding included; each token is of the version that it says."""
    model, url, _ = served
    original, seeds = weights_of(model), {}
    engine = ServerEngine(url, weight_sync=True, start_timeout_seconds=240, vocab_size=512)
    assert (engine.weight_transfer_backend, engine.num_workers, engine.policy_version) == ("llmrl", 1, 0)

    async def converse(index):
        prompt_ids, turns = [1, 493, 198, 148 + index, 314], []
        while not turns or len(seeds) < 3:
            completion = await engine.generate(prompt_ids, SAMPLING)
            turns.append((prompt_ids, completion))
            prompt_ids = [*prompt_ids, *completion.token_ids, 198] if len(prompt_ids) < 150 else prompt_ids[:5]
        return turns

    def update(way):
        if way == "gloo":
            out_of_reach(monkeypatch)
        files = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), anchor_every=8)
        sender = make_sender(files if way == "files" else VLLMWeightSyncScheme(), model, engine)
        seed = len(way)
        set_noisy(model, original, seed=seed, size=0.5)
        seeds[sender.update_weights()] = seed
        assert log_prob_difference(model, engine) < MEAN_TOLERANCE, way
        if way == "files":  # and what one more step changes
            with torch.no_grad():
                model.model.norm.weight[:16].mul_(3)
            assert log_prob_difference(model, engine) > 3 * MEAN_TOLERANCE
            assert sender.update_weights() == 4
            assert [path.name for path in (tmp_path / "deltas").iterdir()] == ["2.delta"]
            assert log_prob_difference(model, engine) < MEAN_TOLERANCE
        sender.shutdown()

    async def run():
        talks = [asyncio.create_task(converse(index)) for index in range(8)]
        for way in ("memory", "gloo", "files"):
            await asyncio.to_thread(update, way)
        return [turn for turns in await asyncio.gather(*talks) for turn in turns]

    turns = asyncio.run(run())
    assert list(seeds) == [1, 2, 3]
    assert all(len(completion.token_ids) == SAMPLING.max_new_tokens for _, completion in turns), "none was lost"
    own, others = [], []
    for version, seed in seeds.items():
        set_noisy(model, original, seed=seed, size=0.5)
        for prompt_ids, completion in turns:
            errors = differences_of(model, [prompt_ids], [completion])[0].abs().tolist()
            for error, of_token in zip(errors, completion.versions, strict=True):
                (own if of_token == version else others).append(error)
    assert sum(own) / len(own) < MEAN_TOLERANCE < sum(others) / len(others) / 3

    async def end_one():
        task = asyncio.create_task(
            engine.generate([1, 2], SAMPLING.with_changes(max_new_tokens=250), request_id="mine")
        )
        while not task.done() and await engine.progress() is None:
            await asyncio.sleep(0.01)
        await engine.abort("mine")
        return await task

    for _ in range(20):  # where this process is slow the server may be through before it is asked to stop
        completion = asyncio.run(end_one())
        if completion.finish_reason == "abort":
            break
    assert completion.finish_reason == "abort"
    assert set(completion.versions) <= {4}
    truncated = asyncio.run(engine.generate([1, 2], SamplingConfig(max_new_tokens=5, top_k=5, temperature=0.7)))
    assert [len(kept) for kept in truncated.sampling_mask] == [5] * 5
    with ServerEngine(url, vocab_size=512) as plain:  # the route that every server has
        completion = asyncio.run(plain.generate([1, 2], SamplingConfig(max_new_tokens=5, top_k=5, temperature=0.7)))
        assert [len(kept) for kept in completion.sampling_mask] == [5] * 5
    engine.shutdown()


# Minutes of starting servers: LLMRL_RESTART_SERVERS=1 asks for them.


def errors_by_version(model, original, seeds, turns):
    """Absolute differences of log-probs from those of the weights that sampled each token, and from the last ones'."""
    own, last = [], []
    for version, seed in seeds.items():
        of_version = [turn for turn in turns if version in turn[1].versions]
        set_noisy(model, original, seed=seed, size=0.5)
        for prompt_ids, completion in of_version if version < max(seeds) else turns:
            errors = differences_of(model, [prompt_ids], [completion])[0].abs().tolist()
            for error, of_token in zip(errors, completion.versions, strict=True):
                (own if of_token == version else last).append(error)
    return sum(own) / len(own), sum(last) / len(last)


async def converse(engine, index, is_over, failures):
    """Turns until it is over; a turn that meets a dead server is tried again."""
    prompt_ids, turns = [1, 493, 198, 148 + index, 314], []
    while not is_over():
        try:
            completion = await engine.generate(prompt_ids, SAMPLING, routing_key=str(index))
        except EngineError:
            failures.append(index)
            await asyncio.sleep(0.5)
            continue
        turns.append((prompt_ids, completion))
        prompt_ids = [*prompt_ids, *completion.token_ids, 198] if len(prompt_ids) < 150 else prompt_ids[:5]
    return turns


restarts = pytest.mark.skipif(not os.environ.get("LLMRL_RESTART_SERVERS"), reason="LLMRL_RESTART_SERVERS is not set")


def turns_while(play, engine, num_conversations, ended, failures):
    """The turns of so many conversations that go on until `play`, in a thread, has returned."""

    async def run():
        indices = range(num_conversations)
        talks = [asyncio.create_task(converse(engine, index, lambda: ended, failures)) for index in indices]
        try:
            await asyncio.to_thread(play)
        finally:
            ended.append(True)
        return [turn for turns in await asyncio.gather(*talks) for turn in turns]

    return asyncio.run(run())


@restarts
@pytest.mark.timeout(900)
def test_a_server_that_is_killed_in_updates_gives_no_token_of_other_weights_when_it_is_back(real_vllm, tmp_path):
    model, port = sharp_llama(tmp_path), free_port()
    options = ("--weight-transfer-config", '{"backend": "llmrl"}')
    processes = [start_server(tmp_path, port, *options)]
    engine = ServerEngine(f"http://127.0.0.1:{port}", weight_sync=True, start_timeout_seconds=240, vocab_size=512)
    replicas = EngineReplicas([engine], num_retries=0)
    sender = make_sender(VLLMWeightSyncScheme(), model, replicas)
    original, seeds, failures, refusals, ended = weights_of(model), {}, [], [], []

    def update(num_versions, pause_s):
        """Send further versions, each again until it arrives."""
        for _ in range(num_versions):
            seed = len(seeds) + 1
            set_noisy(model, original, seed=seed, size=0.5)
            while True:
                try:
                    seeds[sender.update_weights()] = seed
                    break
                except (WeightSyncError, EngineError) as error:
                    refusals.append(str(error))
                    time.sleep(0.2)
            time.sleep(pause_s)

    def play():
        update(3, 0.3)
        for is_in_update in (True, False):
            updating = threading.Thread(target=update, args=(8, 0.0)) if is_in_update else None
            if updating is not None:
                updating.start()
            time.sleep(0.1)  # somewhere in the eight updates
            kill(processes[-1])
            processes.append(start_server(tmp_path, port, *options))
            if updating is not None:
                updating.join()
            wait_until(lambda: replicas.serving == {0})  # by itself, without new weights
            assert log_prob_difference(model, replicas) < MEAN_TOLERANCE
        update(2, 1.0)
        ended.append(True)

    try:
        turns = turns_while(play, replicas, 16, ended, failures)
    finally:
        kill(processes[-1])
        sender.shutdown()
        replicas.shutdown()
    assert engine.num_restarts == 2 and failures and refusals
    assert {version for _, completion in turns for version in completion.versions} <= {0, *seeds}
    own, last = errors_by_version(model, original, seeds, turns)
    print(f"{len(turns)} turns of {len(seeds)} versions, {len(failures)} tried again; {own:.4f} {last:.4f}")
    assert own < MEAN_TOLERANCE < last / 3


@restarts
@pytest.mark.timeout(900)
def test_a_server_that_has_no_llmrl_takes_ten_versions_from_files_with_32_conversations_in_flight(real_vllm, tmp_path):
    (tmp_path / "hidden/llmrl").mkdir(parents=True)
    (tmp_path / "hidden/llmrl/__init__.py").write_text("raise ImportError('llmrl is not here')")
    model, port = sharp_llama(tmp_path / "model", is_tied=False), free_port()
    process = start_server(tmp_path / "model", port, PYTHONPATH=str(tmp_path / "hidden"), VLLM_PLUGINS="")
    original, seeds, failures, ended = weights_of(model), {}, [], []
    engine = ServerEngine(f"http://127.0.0.1:{port}", weight_sync=True, start_timeout_seconds=240, vocab_size=512)
    assert engine.weight_transfer_backend == "files"
    sender = make_sender(VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / "weights")), model, engine)

    def play():
        for seed in range(1, 11):
            set_noisy(model, original, seed=seed, size=0.5)
            seeds[sender.update_weights()] = seed
            assert log_prob_difference(model, engine) < MEAN_TOLERANCE
            time.sleep(0.5)

    try:
        turns = turns_while(play, engine, 32, ended, failures)
        assert_each_weight_arrives(model, engine, sender, [name for name, _ in model.named_parameters()], tolerance=0.1)
    finally:
        kill(process)
        sender.shutdown()
        engine.shutdown()
    assert list(seeds) == list(range(1, 11)) and not failures
    own, last = errors_by_version(model, original, seeds, turns)
    print(f"{len(turns)} turns of {len(seeds)} versions; {own:.4f} {last:.4f}")
    assert own < MEAN_TOLERANCE < last / 3
