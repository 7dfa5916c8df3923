"""Arguments of vLLM that are passed through: each tested one beside the trainer's log-probs, the others refused."""

import asyncio
import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
from causal_types import tiny_config
from engine_checkpoints import enlarged
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from weight_sync_tools import change_every_parameter, differences_of, make_sender, sharp_llama

from llmrl.config.engine import EngineConfig
from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.engines.base import EngineError
from llmrl.engines.vllm import private as vllm_private
from llmrl.engines.vllm.arguments import build_engine_args, default_kv_cache_memory
from llmrl.engines.vllm.model_types import key_value_bytes, read_config
from llmrl.engines.vllm.passed_through import REFUSED, TESTED, check_passed_through, untested
from llmrl.weight_sync import VLLMWeightSyncScheme

# Prompts are prefilled in parts, and requests evicted and computed again: 8 of 4 to 5 blocks share 15.
SMALL = {
    "async_scheduling": False, "enable_chunked_prefill": True, "long_prefill_token_threshold": 32,
    "max_num_batched_tokens": 64, "num_gpu_blocks_override": 15, "skip_tokenizer_init": True,
}  # fmt: skip


def test_a_small_cache_and_chunks_change_no_log_prob(real_vllm, imports_vllm, tmp_path):
    model = sharp_llama(tmp_path)
    options = {"kv_cache_memory": 1 << 26, "cpu_threads": 1, "max_num_seqs": 8, "enable_prefix_caching": False}
    with AsyncVLLM.from_pretrained(tmp_path, max_model_len=256, engine_args=SMALL, **options) as engine:
        assert engine.untested_arguments == ()
        sampling = SamplingConfig(max_new_tokens=40, ignore_eos=True)
        prompts = [[(7 * place + 11 * index) % 500 + 1 for place in range(100)] for index in range(8)]

        async def generate():
            return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

        assert differences_of(model, prompts, asyncio.run(generate())).abs().mean() < 0.1
        change_every_parameter(model, seed=3, size=0.3)
        assert differences_of(model, prompts, asyncio.run(generate())).abs().mean() > 1
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        sender.update_weights()
        sender.shutdown()
        assert differences_of(model, prompts, asyncio.run(generate())).abs().mean() < 0.1


def test_drafted_tokens_are_sampled_and_reported_as_the_trainer_computes_them(real_vllm, imports_vllm, tmp_path):
    config = enlarged("llama", LlamaForCausalLM)
    config.initializer_range, config.tie_word_embeddings = 0.03, True
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2.7)  # tokens are repeated, one in two: some drafts are right
    model.save_pretrained(tmp_path)
    options = {"max_model_len": 128, "kv_cache_memory": 1 << 26, "cpu_threads": 1, "dtype": "float32"}
    prompts = [[9, 5, 7, 11] * 6] * 64
    with AsyncVLLM.from_pretrained(
        tmp_path, speculative="ngram", engine_args={"skip_tokenizer_init": True}, **options
    ) as engine:
        change_every_parameter(model, seed=3, size=0.2)
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        sender.update_weights()
        sender.shutdown()
        for temperature, top_k in ((1.0, 0), (1.5, 8)):
            engine.take_load()
            sampling = SamplingConfig(max_new_tokens=24, ignore_eos=True, temperature=temperature, top_k=top_k)
            completions = engine.generate_batch(prompts, sampling)
            load = engine.take_load()
            assert 100 < load.num_accepted_tokens < load.num_drafted_tokens
            token_ids = torch.tensor([[*p, *c.token_ids] for p, c in zip(prompts, completions, strict=True)])
            with torch.no_grad():
                logits = model(token_ids).logits[:, len(prompts[0]) - 1 : -1] / temperature
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
            of_all = logits.log_softmax(-1)
            of_sampled = of_all.gather(2, token_ids[:, len(prompts[0]) :, None])[:, :, 0]
            reported = torch.tensor([one.log_probs for one in completions])
            assert (reported - of_sampled).abs().max() < 1e-3
            # Log-probs of what is sampled have mean and variance of the distribution, given the tokens before.
            shares = of_all.exp()
            surprise = torch.where(shares > 0, of_all, 0)
            mean = (shares * surprise).sum(-1)
            variance = (shares * surprise**2).sum(-1) - mean**2
            assert abs((of_sampled - mean).sum() / variance.sum().sqrt()) < 6


def test_each_argument_of_the_lists_is_vllms(imports_vllm):
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert known >= TESTED and known >= REFUSED.keys() and not TESTED & REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_change_log_probs_are_refused_before_an_engine_starts(name):
    with pytest.raises(ValueError, match=f"engine_args may not hold '{name}': .*Leave it out"):
        EngineConfig(engine_args={name: {"method": "ngram"}})
    check_passed_through({name: None})


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, "it rounds the engine's cache"),
        ({"speculative": "eagle"}, "speculative must be 'ngram' or None, got 'eagle'"),
        (
            {"num_devices": 2, "engine_args": {"tensor_parallel_size": 4}},
            r"num_devices and engine_args\['tensor_parallel_size'\] set the same",
        ),
        ({"compile": True, "enforce_eager": True}, "compile and enforce_eager set the same"),
        ({"verbose": True, "log_level": "ERROR"}, "verbose and log_level set the same"),
    ],
)
def test_values_that_no_engine_takes_are_value_errors(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        AsyncVLLM.from_pretrained(tmp_path, **option)


def test_a_vllm_that_lacks_a_name_is_an_import_error(imports_vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    monkeypatch.setitem(vllm_private._MODULES, "NewName", "vllm.config")
    with pytest.raises(ImportError, match=r"lacks vllm.config.NewName\. Install"):
        AsyncVLLM.from_pretrained(tmp_path, kv_cache_memory=1 << 26)


def test_delta_rules_in_float32_are_refused_on_a_cpu_before_an_engine_starts(imports_vllm, tmp_path):
    tiny_config("qwen3_5").save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"bfloat16 alone, got float32: set dtype='bfloat16'"):
        AsyncVLLM.from_pretrained(tmp_path, kv_cache_memory=1 << 26)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_bytes_of_a_token_are_those_that_transformers_keep(tmp_path, model_type, dtype):
    config = tiny_config(model_type)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    cache = model(torch.arange(1, 6)[None], use_cache=True).past_key_values
    kept = sum(one.nbytes for layer in cache.layers for one in (layer.keys, layer.values))
    assert key_value_bytes(read_config(tmp_path), dtype) == kept / 5


def test_a_cache_is_as_large_as_its_requests_and_no_larger(real_vllm, imports_vllm, tmp_path):
    config = enlarged("llama", LlamaForCausalLM)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = {"max_model_len": 60, "max_num_seqs": 4, "engine_args": {"skip_tokenizer_init": True}}
    with AsyncVLLM.from_pretrained(tmp_path, cpu_threads=1, **options) as engine:
        assert engine.llm.vllm_config.cache_config.num_gpu_blocks == 9  # two of each request, and vLLM's own
        sampling = SamplingConfig(max_new_tokens=50, ignore_eos=True)
        answers = engine.generate_batch([[7, 8, 9, index + 1] * 2 for index in range(4)], sampling)
    assert [len(answer.token_ids) for answer in answers] == [50] * 4


def test_a_cache_of_another_kind_is_not_bounded(tmp_path):
    tiny_config("mamba").save_pretrained(tmp_path)
    assert key_value_bytes(read_config(tmp_path), "float32") is None
    assert key_value_bytes(read_config(tmp_path / "absent"), "float32") is None
    sizes = {"max_num_seqs": 1, "max_model_len": 32, "dtype": "float32"}
    assert default_kv_cache_memory(tmp_path, **sizes) > 100 << 20


def test_an_entry_of_the_configuration_is_not_given_twice():
    with pytest.raises(ValueError, match=r"set engine\.tensor_parallel_size"):
        EngineConfig(engine_args={"tensor_parallel_size": 2})


def test_arguments_that_no_test_covers_warn_once_and_are_remembered(imports_vllm, caplog):
    options = {"kv_cache_memory": 1, "weight_transfer": False, "engine_args": {"swap": 1}}
    with pytest.raises(TypeError, match="swap"):
        build_engine_args("model", options, is_cpu=True)
    options["engine_args"] = {"attention_backend": "CPU_ATTN", "max_num_batched_tokens": 64}
    with caplog.at_level(logging.WARNING, logger="llmrl"):
        build_engine_args("model", options, is_cpu=True)
    (record,) = caplog.records
    assert "do not compare attention_backend with" in record.getMessage()
    assert untested(options["engine_args"]) == ("attention_backend",)
    assert untested({"hf_overrides": {"rope_theta": 1e3}}) == ("hf_overrides",)
    assert untested({"hf_overrides": {"head_dtype": "float32"}}) == ()


def test_the_page_lists_the_arguments_and_the_tests_that_use_them():
    text = (Path(__file__).parents[2] / "docs/models.md").read_text().partition("## Arguments of vLLM")[2]
    tested, _, others = text.partition("\n## ")[0].partition("Others:")
    found = {}
    for line in tested.splitlines():
        if line.startswith("| `"):
            arguments, _, files = line.strip("| ").split(" | ")
            (file,) = re.findall(r"test_\w+\.py", files)
            (path,) = Path(__file__).parents[1].rglob(file)
            found |= dict.fromkeys(re.findall(r"`(\w+)", arguments), path.read_text())
    options = {"enable_prefix_caching", "max_num_seqs", "engine"}  # of `from_pretrained`
    assert found.keys() - options == TESTED
    assert all(re.search(rf"\b{name}\b", source) for name, source in found.items())
    assert set(re.findall(r"`(\w+)`", others)) >= REFUSED.keys()
