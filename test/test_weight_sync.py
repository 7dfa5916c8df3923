"""New weights reach the running engine whole: every parameter changes, log-probs are compared with transformers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from llmrl.engines import SamplingConfig
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError, get_model_metadata

pytest.importorskip("vllm")

# Mean absolute difference of a bfloat16 engine's log-probs from a float32 model's: 0.03 here, 0.04 after noise.
MEAN_TOLERANCE = 0.08
SAMPLING = SamplingConfig(max_new_tokens=24, ignore_eos=True)


def log_prob_difference(model, engine, *, sampling=SAMPLING):
    """Mean absolute difference of the engine's log-probs from the model's on freshly sampled tokens."""
    prompts = [[1, 4093, 198, 1348 + i, 314, 260, 3575] for i in range(4)]
    completions = engine.generate_batch(prompts, sampling)
    differences = [difference_of(model, p, c).abs() for p, c in zip(prompts, completions, strict=True)]
    return torch.cat(differences).mean().item()


def difference_of(model, prompt_ids, completion):
    """[num_tokens] the engine's log-probs less the model's."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    token_ids = torch.tensor(completion.token_ids)
    return torch.tensor(completion.log_probs) - logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def change_every_parameter(model, *, seed, size=0.05):
    """Relative noise on every parameter, the embedding that is also the head included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))


@pytest.fixture
def sender(vllm_engine, reference_model):
    """A sender of the reference model; engine and model get their weights back afterwards."""
    original = {name: parameter.detach().clone() for name, parameter in reference_model.named_parameters()}
    sender = VLLMWeightSyncScheme().create_sender()
    sender.register_model(reference_model)
    sender.init_all_workers_group(get_model_metadata(reference_model), vllm_engine)
    yield sender
    with torch.no_grad():
        for name, parameter in reference_model.named_parameters():
            parameter.copy_(original[name])
    sender.update_weights()
    sender.shutdown()


def test_every_parameter_arrives(sender, vllm_engine, reference_model):
    assert reference_model.config.tie_word_embeddings, "the trap needs a tied head"
    before = log_prob_difference(reference_model, vllm_engine)
    assert before < MEAN_TOLERANCE
    version = vllm_engine.policy_version
    change_every_parameter(reference_model, seed=0)
    assert log_prob_difference(reference_model, vllm_engine) > 3 * MEAN_TOLERANCE, "noise too small to be seen"
    assert sender.update_weights() == version + 1 == vllm_engine.policy_version
    assert log_prob_difference(reference_model, vllm_engine) < max(MEAN_TOLERANCE, 2 * before)
    assert set(sender.last_timings) == {"stage_s", "pause_s", "send_s", "reset_cache_s", "resume_s"}


def test_a_head_left_behind_would_be_seen_by_the_comparison(sender, vllm_engine, reference_model):
    """Were the engine's head a copy of the old embedding, it would differ as much as a model with the old head."""
    old_head = reference_model.lm_head.weight.detach().clone()
    change_every_parameter(reference_model, seed=1)
    sender.update_weights()
    assert log_prob_difference(reference_model, vllm_engine) < MEAN_TOLERANCE

    def with_old_head(token_ids):
        hidden = reference_model.model(token_ids).last_hidden_state
        return SimpleNamespace(logits=hidden @ old_head.T)

    assert log_prob_difference(with_old_head, vllm_engine) > 2 * MEAN_TOLERANCE


def test_requests_in_flight_survive_updates_and_use_no_old_block(sender, vllm_engine, reference_model):
    prompt_ids = [1, 4093, 198, 1348, 314, 260, 3575]
    num_requests, num_tokens, num_updates = 32, 64, 3
    states = {vllm_engine.policy_version: _copy(reference_model)}

    async def run():
        sampling = SAMPLING.with_changes(max_new_tokens=num_tokens)
        tasks = [asyncio.create_task(vllm_engine.generate(prompt_ids, sampling)) for _ in range(num_requests)]
        for update in range(num_updates):
            await _until_tokens(vllm_engine, (update + 1) * num_tokens // (num_updates + 2))
            change_every_parameter(reference_model, seed=10 + update, size=0.03)
            states[await asyncio.to_thread(sender.update_weights)] = _copy(reference_model)
        return await asyncio.gather(*tasks)

    completions = asyncio.run(run())
    assert [len(one.token_ids) for one in completions] == [num_tokens] * num_requests
    assert all(one.versions == sorted(one.versions) for one in completions)
    assert {version for one in completions for version in one.versions} == set(states)
    # Of each token, the version that it says it was sampled by, over the whole prefix: no block of old weights.
    errors = []
    for version, state in states.items():
        reference_model.load_state_dict(state)
        for one in completions[:3]:
            is_own = torch.tensor(one.versions) == version
            errors.append(difference_of(reference_model, prompt_ids, one)[is_own].abs())
    assert torch.cat(errors).mean() < MEAN_TOLERANCE


@pytest.mark.parametrize("fault", ["unknown", "missing", "wrong shape"])
def test_a_failed_update_leaves_the_old_weights_and_can_be_retried(sender, vllm_engine, reference_model, fault):
    version = sender.update_weights()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in reference_model.named_parameters()}
    if fault == "unknown":
        zeros["model.extra.weight"] = torch.zeros(3)
    elif fault == "missing":
        del zeros["model.layers.7.self_attn.k_proj.weight"]
    else:
        zeros["model.layers.7.self_attn.k_proj.weight"] = torch.zeros(3, 5)
    with pytest.raises(WeightSyncError, match=f"holds the weights of version {version} as before"):
        sender.update_weights(zeros)
    assert vllm_engine.policy_version == version
    assert log_prob_difference(reference_model, vllm_engine) < MEAN_TOLERANCE
    change_every_parameter(reference_model, seed=3)
    assert sender.update_weights() == version + 1
    assert log_prob_difference(reference_model, vllm_engine) < MEAN_TOLERANCE


def test_the_prefix_cache_is_empty_after_an_update(sender, vllm_engine):
    prompt_ids, sampling = list(range(100, 500)), SamplingConfig(max_new_tokens=1)
    vllm_engine.generate_batch([prompt_ids], sampling)
    assert vllm_engine.generate_batch([prompt_ids], sampling)[0].metrics["num_cached_tokens"] > 0
    sender.update_weights()
    assert vllm_engine.generate_batch([prompt_ids], sampling)[0].metrics["num_cached_tokens"] == 0


def test_abort_mode_ends_requests_with_what_they_have(vllm_engine, reference_model, sender):
    other = VLLMWeightSyncScheme(pause_mode="abort").create_sender()
    other.register_model(reference_model)
    other.init_all_workers_group(None, vllm_engine)

    async def run():
        task = asyncio.create_task(vllm_engine.generate([1, 2, 3], SAMPLING.with_changes(max_new_tokens=1500)))
        await _until_tokens(vllm_engine, 5)
        await asyncio.to_thread(other.update_weights)
        return await task

    completion = asyncio.run(run())
    other.shutdown()
    assert completion.finish_reason == "abort"
    assert 5 <= len(completion.token_ids) == len(completion.log_probs) < 1500


def _copy(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


async def _until_tokens(engine, num_tokens):
    """Wait until the requests in flight have some tokens each."""
    for _ in range(3000):
        states = list(engine._llm.output_processor.request_states.values())
        if states and min(state.detokenizer.num_output_tokens() for state in states) >= num_tokens:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {num_tokens} tokens in a minute")
