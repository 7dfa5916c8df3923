"""A real `vllm serve`, in a process of its own, whose weights are replaced over HTTP by every way that a CPU has."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
import torch
from weight_sync_tools import (
    SAMPLING,
    differences_of,
    log_prob_difference,
    make_sender,
    out_of_reach,
    set_noisy,
    sharp_llama,
    weights_of,
)

from llmrl.engines import SamplingConfig, ServerEngine
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme

# Mean absolute difference of log-probs from the model's: 0.005 of this model, which is very sure of its tokens.
MEAN_TOLERANCE = 0.05
VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(real_vllm, tmp_path_factory):
    """A model with a tied head, and the address of a server of it."""
    path, port = tmp_path_factory.mktemp("served"), free_port()
    model = sharp_llama(path)
    # The server's command is a script of vLLM's package, which is not found by that name where it is built for a CPU.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "256", "--skip-tokenizer-init",
        "--enforce-eager", "--block-size", "32", "--logprobs-mode", "processed_logprobs", "--enable-scale-out",
        "--weight-transfer-config", '{"backend": "llmrl"}', "--distributed-executor-backend", "uni",
    ]  # fmt: skip
    log = (path / "log").open("w")
    process = subprocess.Popen(
        command, env=os.environ | VARIABLES, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    yield model, f"http://127.0.0.1:{port}", process
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    log.close()


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
        while await engine.progress() is None:
            await asyncio.sleep(0.01)
        await engine.abort("mine")
        return await task

    completion = asyncio.run(end_one())
    assert completion.finish_reason == "abort"
    assert set(completion.versions) <= {4}
    truncated = asyncio.run(engine.generate([1, 2], SamplingConfig(max_new_tokens=5, top_k=5, temperature=0.7)))
    assert [len(kept) for kept in truncated.sampling_mask] == [5] * 5
    with ServerEngine(url, vocab_size=512) as plain:  # the route that every server has
        completion = asyncio.run(plain.generate([1, 2], SamplingConfig(max_new_tokens=5, top_k=5, temperature=0.7)))
        assert [len(kept) for kept in completion.sampling_mask] == [5] * 5
    engine.shutdown()
