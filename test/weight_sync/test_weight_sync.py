"""New weights reach running engines whole: every parameter changes, log-probs are compared with transformers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from weight_sync_tools import (
    SAMPLING,
    differences_of,
    log_prob_difference,
    make_sender,
    out_of_reach,
    set_noisy,
    weights_of,
)

from llmrl.engines import AsyncVLLM
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme

# Mean absolute difference of a float32 engine's log-probs from the model's: 1e-5 here.
MEAN_TOLERANCE = 0.001


@pytest.fixture(scope="module")
def second_engine(shallow_model_path, real_vllm):
    """A second replica of the session's engine."""
    engine = AsyncVLLM.from_pretrained(
        shallow_model_path, max_model_len=512, kv_cache_memory=1 << 27, engine_args={"skip_tokenizer_init": True}
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def original(shallow_engine, shallow_model):
    """The weights that engine and model start with, and get back afterwards."""
    state = weights_of(shallow_model)
    yield state
    shallow_model.load_state_dict(state)
    sender = make_sender(VLLMWeightSyncScheme(), shallow_model, shallow_engine)
    sender.update_weights()
    sender.shutdown()


@pytest.fixture(scope="module")
def level(shallow_engine, shallow_model, original):
    """How far engine and model differ without any update."""
    difference = log_prob_difference(shallow_model, shallow_engine)
    assert difference < MEAN_TOLERANCE
    return difference


@pytest.mark.parametrize("way", ["shared memory", "gloo", "double buffer"])
def test_every_parameter_arrives_at_every_replica(
    shallow_engine, second_engine, shallow_model, original, level, tmp_path, monkeypatch, way
):
    assert shallow_model.config.tie_word_embeddings, "the trap needs a tied head"
    engines = [shallow_engine, second_engine]
    if way == "gloo":
        out_of_reach(monkeypatch)
    is_file = way == "double buffer"
    anchors = {"anchor_every": 1 if way == "shared memory" else 4}
    files = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), **anchors)
    sender = make_sender(files if is_file else VLLMWeightSyncScheme(**anchors), shallow_model, engines)
    version = max(engine.policy_version for engine in engines)
    set_noisy(shallow_model, original, seed=len(way), size=0.05)
    assert sender.update_weights() == version + 1
    if anchors["anchor_every"] > 1:
        with torch.no_grad():
            shallow_model.model.norm.weight[:16].mul_(3)
        assert log_prob_difference(shallow_model, engines[1]) > 3 * MEAN_TOLERANCE
        assert sender.update_weights() == version + 2
    sender.shutdown()
    assert len({engine.policy_version for engine in engines}) == 1
    for engine in engines:
        assert log_prob_difference(shallow_model, engine) < max(MEAN_TOLERANCE, 2 * level)
    assert set(sender.last_timings) == {"stage_s", "pause_s", "send_s", "load_s", "resume_s"}


def test_a_head_left_behind_would_be_seen_by_the_comparison(shallow_engine, shallow_model, original):
    """Were the engine's head a copy of the old embedding, it would differ as much as a model with the old head."""
    set_noisy(shallow_model, original, seed=1, size=0.05)
    assert log_prob_difference(shallow_model, shallow_engine) > 3 * MEAN_TOLERANCE, "noise too small to be seen"
    sender = make_sender(VLLMWeightSyncScheme(), shallow_model, shallow_engine)
    sender.update_weights()
    sender.shutdown()
    assert log_prob_difference(shallow_model, shallow_engine) < MEAN_TOLERANCE

    def with_old_head(token_ids):
        hidden = shallow_model.model(token_ids).last_hidden_state
        return SimpleNamespace(logits=hidden @ original["lm_head.weight"].T)

    assert log_prob_difference(with_old_head, shallow_engine) > 2 * MEAN_TOLERANCE


def test_32_conversations_go_on_while_10_updates_pass(shallow_engine, shallow_model, original):
    """No request is lost, versions grow, and each token is of the version that it says, to the token."""
    num_conversations, num_updates = 32, 10
    shallow_model.load_state_dict(original)
    sender = make_sender(VLLMWeightSyncScheme(), shallow_model, shallow_engine)
    seeds = {sender.update_weights(): None}
    first = next(iter(seeds))

    async def converse(index):
        prompt_ids, turns = [1, 493, 198, 148 + index, 314], []
        while not turns or len(seeds) <= num_updates:
            completion = await shallow_engine.generate(prompt_ids, SAMPLING)
            turns.append((list(prompt_ids), completion))
            prompt_ids = [*prompt_ids, *completion.token_ids, 198, 260 + len(turns)]
        return turns

    async def run():
        tasks = [asyncio.create_task(converse(index)) for index in range(num_conversations)]
        for seed in range(num_updates):
            await _tokens_of_a_new_version(shallow_engine)
            await asyncio.to_thread(set_noisy, shallow_model, original, seed=seed, size=0.04)
            seeds[await asyncio.to_thread(sender.update_weights)] = seed
        return await asyncio.gather(*tasks)

    conversations = asyncio.run(run())
    sender.shutdown()
    assert list(seeds) == list(range(first, first + num_updates + 1))
    completions = [completion for turns in conversations for _, completion in turns]
    assert all(len(one.token_ids) == len(one.versions) == SAMPLING.max_new_tokens for one in completions)
    for turns in conversations:
        versions = [version for _, completion in turns for version in completion.versions]
        assert versions == sorted(versions)
    assert {version for one in completions for version in one.versions} == set(seeds)

    own, of_next, at_ends = [], [], []
    for version, seed in seeds.items():
        if seed is None:
            shallow_model.load_state_dict(original)
        else:
            set_noisy(shallow_model, original, seed=seed, size=0.04)
        for turns in conversations[::8]:
            for prompt_ids, completion in turns:
                versions = torch.tensor(completion.versions)
                # The tokens beside a change: one of them with a wrong version would stand out.
                is_end = torch.zeros_like(versions, dtype=torch.bool)
                changes = (versions[1:] != versions[:-1]).nonzero()[:, 0]
                is_end[changes] = is_end[changes + 1] = True
                if not ((versions == version) | (is_end & (versions == version - 1))).any():
                    continue
                errors = differences_of(shallow_model, [prompt_ids], [completion])[0].abs()
                own.append(errors[versions == version])
                at_ends.append(errors[is_end & (versions == version)])
                of_next.append(errors[is_end & (versions == version - 1)])
    at_ends, of_next = torch.cat(at_ends), torch.cat(of_next)
    assert torch.cat(own).mean() < MEAN_TOLERANCE
    assert len(at_ends) >= num_updates
    assert at_ends.mean() < MEAN_TOLERANCE < of_next.mean() / 1.5


async def _tokens_of_a_new_version(engine):
    """Wait until requests in flight have grown by a few tokens each since the last update."""
    for _ in range(4):  # the first may have been on its way when the update came
        num_tokens = await engine.progress()
        while await engine.progress() in (None, num_tokens):
            await asyncio.sleep(0.01)
