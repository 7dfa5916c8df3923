"""AsyncVLLM against the real engine on CPU, compared with transformers on the same tokens."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from types import SimpleNamespace

import pytest
import torch
from waiting import begin, is_running, wait_until

from llmrl.engines import AsyncVLLM, Engine, EngineError, SamplingConfig
from llmrl.engines.hang_detector import HangWatch
from llmrl.engines.vllm.private import processes_of
from llmrl.engines.vllm.requests import read_completion

# Engine and reference compute in float32: log-probs differ by 1e-5 on average here.
MEAN_TOLERANCE = 0.001


@pytest.fixture(scope="module")
def prompt_ids(tokenizer):
    chat = [{"role": "user", "content": "Tell me about the sea."}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def reference_log_probs(model, prompt_ids, completion, sampling):
    """[num_tokens] log-probs of the completion under the distribution that `sampling` describes."""
    token_ids = torch.tensor(completion.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt_ids, *completion.token_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    logits = logits / (sampling.temperature or 1.0)
    if sampling.top_k:
        floor = logits.topk(sampling.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    return logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0]


def differences(model, prompt_ids, completions, sampling):
    return torch.cat(
        [
            (reference_log_probs(model, prompt_ids, one, sampling) - torch.tensor(one.log_probs)).abs()
            for one in completions
        ]
    )


def test_it_is_an_engine(shallow_engine):
    assert isinstance(shallow_engine, Engine)
    assert shallow_engine.is_alive
    assert shallow_engine.max_model_len == 2048
    assert shallow_engine.start_s > 0


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5, 0.0])
def test_log_probs_are_those_of_the_distribution_sampled_from(shallow_engine, shallow_model, prompt_ids, temperature):
    sampling = SamplingConfig(max_new_tokens=32, temperature=temperature)
    completions = shallow_engine.generate_batch([prompt_ids] * 4, sampling)
    difference = differences(shallow_model, prompt_ids, completions, sampling)
    assert difference.mean() < MEAN_TOLERANCE
    if temperature not in (0.0, 1.0):
        raw = differences(shallow_model, prompt_ids, completions, sampling.with_changes(temperature=1.0))
        assert raw.mean() > 2 * MEAN_TOLERANCE, "the comparison would not see unscaled log-probs"


def test_top_k_is_part_of_the_distribution(shallow_engine, shallow_model, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=32, top_k=5)
    completions = shallow_engine.generate_batch([prompt_ids] * 4, sampling)
    # Rounding may rank the fifth and sixth token the other way round: the reference then says minus infinity.
    difference = differences(shallow_model, prompt_ids, completions, sampling)
    is_ranked_alike = difference.isfinite()
    assert is_ranked_alike.float().mean() > 0.9
    assert difference[is_ranked_alike].mean() < 2 * MEAN_TOLERANCE


def test_top_k_of_one_is_certain(shallow_engine, prompt_ids):
    greedy, certain = (
        shallow_engine.generate_batch([prompt_ids], SamplingConfig(max_new_tokens=8, **options))[0]
        for options in ({"temperature": 0.0}, {"top_k": 1})
    )
    assert certain.token_ids == greedy.token_ids
    assert certain.log_probs == [0.0] * 8


def test_min_p_narrows_the_distribution(shallow_engine, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=16, temperature=2.0, ignore_eos=True, replay=False)
    [wild] = shallow_engine.generate_batch([prompt_ids], sampling)
    [tame] = shallow_engine.generate_batch([prompt_ids], sampling.with_changes(min_p=0.9))
    assert sum(tame.log_probs) > sum(wild.log_probs) / 4


def test_a_seed_of_a_request_is_refused_on_cpu_where_long_prompts_would_end_the_engine(shallow_engine, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=16, temperature=1.5, seed=7)
    with pytest.raises(ValueError, match="its own seed"):
        shallow_engine.generate_batch([prompt_ids], sampling)
    [greedy] = shallow_engine.generate_batch([prompt_ids], sampling.with_changes(temperature=0.0))
    assert len(greedy.token_ids) == 16
    free = shallow_engine.generate_batch([prompt_ids] * 4, sampling.with_changes(seed=None))
    assert len({tuple(one.token_ids) for one in free}) > 1


def test_a_repetition_penalty_is_honoured(vllm_engine, tokenizer):
    prompt_ids = tokenizer("one one one one one one one one")["input_ids"]
    sampling = SamplingConfig(max_new_tokens=12, temperature=0.0)
    [plain] = vllm_engine.generate_batch([prompt_ids], sampling)
    [varied] = vllm_engine.generate_batch([prompt_ids], sampling.with_changes(repetition_penalty=5.0))
    assert len(set(varied.token_ids)) > len(set(plain.token_ids))


def test_a_sampled_stop_token_stays(vllm_engine, tokenizer):
    chat = [{"role": "user", "content": "Say yes."}]
    prompt_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    completion = vllm_engine.generate_batch([prompt_ids], SamplingConfig(max_new_tokens=200, temperature=0.0))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == tokenizer.eos_token_id
    assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)


def test_extra_stop_tokens_end_and_stay(shallow_engine, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=16, temperature=0.0)
    [whole] = shallow_engine.generate_batch([prompt_ids], sampling)
    stop = whole.token_ids[5]
    [cut] = shallow_engine.generate_batch([prompt_ids], sampling.with_changes(stop_token_ids=(stop,)))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.finish_reason == "stop"


def test_a_stop_string_inside_a_token_keeps_the_sampled_ids(shallow_engine, tokenizer, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=24, temperature=0.0)
    [whole] = shallow_engine.generate_batch([prompt_ids], sampling)
    words = [tokenizer.decode([token]) for token in whole.token_ids]
    index = next(i for i in range(3, len(words)) if len(words[i].strip()) >= 5)
    stop = words[index].strip()[:-1]  # ends one letter before the token does
    [cut] = shallow_engine.generate_batch([prompt_ids], sampling.with_changes(stop=(stop,)))
    assert cut.stop_string == stop
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in tokenizer.decode(cut.token_ids)
    assert stop not in tokenizer.decode(cut.token_ids[:-1])
    assert len(cut.log_probs) == len(cut.versions) == len(cut.token_ids)


def test_the_budget_is_clipped_to_the_context(shallow_engine):
    [completion] = shallow_engine.generate_batch([[5] * 2045], SamplingConfig(max_new_tokens=100, ignore_eos=True))
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ([5] * 2048, "2048"), ([10**7], "out of vocabulary"), ([-3], "vocabulary")]
)
def test_prompts_that_cannot_be_served_are_refused(shallow_engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        asyncio.run(shallow_engine.generate(prompt, SamplingConfig()))
    assert shallow_engine.is_alive


def test_abort_returns_what_it_has(shallow_engine, prompt_ids):
    async def run():
        sampling = SamplingConfig(max_new_tokens=1500, ignore_eos=True)
        task = await begin(shallow_engine, prompt_ids, sampling, request_id="long")
        with pytest.raises(ValueError, match="in flight"):
            await shallow_engine.generate(prompt_ids, sampling, request_id="long")
        await shallow_engine.abort("long")
        await shallow_engine.abort("never seen")
        return await task

    completion = asyncio.run(run())
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < 1500
    assert len(completion.log_probs) == len(completion.versions) == len(completion.token_ids)


def test_cancelling_aborts_in_the_engine(shallow_engine, prompt_ids):
    async def run():
        sampling = SamplingConfig(max_new_tokens=1500, ignore_eos=True)
        task = await begin(shallow_engine, prompt_ids, sampling)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_until(lambda: not shallow_engine.llm.output_processor.request_states)
    assert shallow_engine.num_in_flight == 0


def test_a_batch_with_a_prompt_that_is_refused_leaves_no_request(shallow_engine, prompt_ids):
    sampling = SamplingConfig(max_new_tokens=1500, ignore_eos=True)
    with pytest.raises(ValueError, match="empty"):
        shallow_engine.generate_batch([prompt_ids, [], prompt_ids], sampling)
    assert shallow_engine.num_in_flight == 0
    assert not shallow_engine.llm.output_processor.request_states


def test_the_prefix_cache_serves_shared_prompts_until_it_is_reset(shallow_engine):
    prompt_ids = list(range(100, 500))
    sampling = SamplingConfig(max_new_tokens=1)
    shallow_engine.reset_prefix_cache()
    cached = [shallow_engine.generate_batch([prompt_ids], sampling)[0].metrics["num_cached_tokens"] for _ in range(2)]
    assert cached[0] == 0
    assert cached[1] >= 256
    shallow_engine.reset_prefix_cache()
    assert shallow_engine.generate_batch([prompt_ids], sampling)[0].metrics["num_cached_tokens"] == 0


def test_the_load_is_what_its_requests_say_of_themselves(shallow_engine, prompt_ids):
    shallow_engine.reset_prefix_cache()
    shallow_engine.take_load()
    prompt, sampling = prompt_ids * 8, SamplingConfig(max_new_tokens=24, ignore_eos=True)
    first = shallow_engine.generate_batch([prompt], sampling)
    later = shallow_engine.generate_batch([prompt] * 6, sampling)
    load = shallow_engine.take_load()
    assert load.num_prompt_tokens == 7 * len(prompt)
    assert load.num_cached_tokens == sum(one.metrics["num_cached_tokens"] for one in first + later) > 0
    cache = shallow_engine.llm.vllm_config.cache_config
    blocks = 6 * (24 // cache.block_size)  # that six answers fill on their own
    assert blocks / cache.num_gpu_blocks <= load.kv_use_max < 1
    assert load.num_preemptions == 0
    assert shallow_engine.take_load().to_metrics() == {
        "engine_kv_use_max": 0, "engine_waiting_max": 0, "engine_preemptions": 0
    }  # fmt: skip


def test_pause_keeps_requests_and_resume_finishes_them(shallow_engine, prompt_ids):
    async def run():
        task = await begin(shallow_engine, prompt_ids, SamplingConfig(max_new_tokens=256, ignore_eos=True))
        await asyncio.to_thread(shallow_engine.pause)
        await asyncio.sleep(1.0)
        assert not task.done()
        await asyncio.to_thread(shallow_engine.resume)
        return await task

    assert len(asyncio.run(run()).token_ids) == 256


def test_an_engine_whose_process_is_stopped_hangs_and_says_what_to_do(shallow_engine, prompt_ids, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(shallow_engine, "shutdown", ended.set)  # the session's engine goes on
    monkeypatch.setattr(shallow_engine, "_watch", HangWatch(0.8))
    processes = processes_of(shallow_engine.llm)

    async def run():
        task = await begin(shallow_engine, prompt_ids, SamplingConfig(max_new_tokens=256, ignore_eos=True))
        for process in processes:
            os.kill(process.pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(ended.wait, 60)
            assert ended.is_set() and not shallow_engine.is_alive
            with pytest.raises(EngineError, match=r"no token for 0.8 s.*Start it again.*hang_timeout_seconds"):
                await shallow_engine.generate(prompt_ids, SamplingConfig())
            with pytest.raises(EngineError, match=r"no token for 0\.8 s"):
                shallow_engine.reset_prefix_cache()
        finally:
            for process in processes:
                os.kill(process.pid, signal.SIGCONT)
        await task

    asyncio.run(run())


def test_unknown_engine_arguments_are_refused_with_the_nearest_name(model_path):
    with pytest.raises(TypeError, match="did you mean 'tensor_parallel_size'"):
        AsyncVLLM.from_pretrained(model_path, engine_args={"tensor_paralel_size": 2})
    with pytest.raises(TypeError, match="log-probs depend on it"):
        AsyncVLLM.from_pretrained(model_path, engine_args={"logprobs_mode": "raw_logprobs"})
    with pytest.raises(TypeError, match="kv_cache_memory="):
        AsyncVLLM.from_pretrained(model_path, engine_args={"kv_cache_memory_bytes": 1})
    with pytest.raises(TypeError, match="did you mean 'max_model_len'"):
        AsyncVLLM.from_pretrained(model_path, max_model_length=5)


@pytest.mark.parametrize("name", ["use_ray", "ray_options", "ray_init_config"])
def test_what_starts_several_engines_is_named_where_it_is_asked_for(model_path, name):
    with pytest.raises(TypeError, match=rf"no argument '{name}': call EngineReplicas\.from_pretrained"):
        AsyncVLLM.from_pretrained(model_path, **{name: 2})


@pytest.mark.slow
def test_a_model_that_does_not_exist_is_an_engine_error(tmp_path):
    with pytest.raises(EngineError, match="did not start"):
        AsyncVLLM.from_pretrained(tmp_path)


def test_a_value_that_vllm_does_not_take_is_refused(shallow_engine):
    with pytest.raises(ValueError, match="temperature"):
        shallow_engine.generate_batch([[1]], SamplingConfig(temperature=3.0))


def version_span(version, start, end):
    return SimpleNamespace(version=version, start=start, end=end)


@pytest.mark.parametrize("column", ["logprobs", "weight_versions"])
def test_answers_without_a_value_for_each_token_are_refused(column):
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    columns = {
        "logprobs": FlatLogprobs(logprobs=[-0.1, -0.2], token_ids=[1, 2], start_indices=[0, 1], end_indices=[1, 2]),
        "weight_versions": [version_span("default", 0, 1), version_span("3", 1, 2)],
    }

    def output(**changes):
        sample = CompletionOutput(0, "", [1, 2], None, None, finish_reason="stop")
        vars(sample).update(columns | changes)  # vLLM 0.31 has no field for versions
        return RequestOutput("id", None, [9], None, [sample], True)

    assert read_completion(output(), 9).versions == [0, 3]
    assert read_completion(output(), 9).log_probs == [-0.1, -0.2]
    with pytest.raises(EngineError, match="one per token"):
        read_completion(output(**{column: None}), 9)


def start_tiny(path):
    return AsyncVLLM.from_pretrained(
        path, max_model_len=2048, kv_cache_memory=1 << 26, engine_args={"skip_tokenizer_init": True}
    )


def engine_processes(engine):
    return [process.pid for process in engine.llm.engine_core.resources.engine_manager.processes]


def test_death_fails_what_is_in_flight_and_shutdown_leaves_nothing(tiny_model_path, spawned_engines):
    engine = start_tiny(tiny_model_path)
    [pid] = engine_processes(engine)
    sampling = SamplingConfig(max_new_tokens=2000, ignore_eos=True)

    async def run():
        tasks = [asyncio.create_task(engine.generate([1, 2], sampling)) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 240)

    results = asyncio.run(run())
    assert [type(result) for result in results] == [EngineError] * 4
    assert not engine.is_alive
    with pytest.raises(EngineError):
        asyncio.run(engine.generate([1], sampling))
    with pytest.raises(EngineError):
        engine.pause()
    engine.shutdown()
    engine.shutdown()
    assert not is_running(pid)


@pytest.mark.parametrize("thread", ["another", "its own"])
def test_collection_ends_the_engine(tiny_model_path, real_vllm, thread):
    engines = [start_tiny(tiny_model_path)]
    [pid] = engine_processes(engines[0])
    background = engines[0]._background
    assert is_running(pid)

    async def collect():
        engines.clear()
        gc.collect()

    if thread == "another":
        asyncio.run(collect())
    else:
        background.run(collect())
    wait_until(lambda: not is_running(pid) and background.is_closed)
