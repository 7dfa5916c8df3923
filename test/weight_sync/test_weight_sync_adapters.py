"""Adapters alone reach vLLM: each request ends on the version it began with, its log-probs are peft's own."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import pytest
import torch
from loss_batches import with_drawn_adapters
from waiting import wait_until
from weight_sync_tools import FakeEngine, difference_of, make_sender, sharp_llama

from llmrl.engines import AsyncVLLM, EngineReplicas, SamplingConfig
from llmrl.engines.base import EngineError
from llmrl.engines.vllm.arguments import ADAPTER_BACKEND, build_engine_args
from llmrl.engines.vllm.updates import AdapterUpdates
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError, get_model_metadata

peft = pytest.importorskip("peft")
RANK, MAX_LORAS = 4, 4
SCHEME = VLLMWeightSyncScheme(lora="adapter")
PROMPT = list(range(3, 73))  # two blocks of the prefix cache, and a rest


def adapted(model, targets="all-linear", **arguments):
    """Peft's model; its alpha / r is no power of two."""
    arguments = {"r": RANK, "lora_alpha": 6, "init_lora_weights": False, **arguments}
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, **arguments))
    return model.eval()


def set_adapters(model, seed):
    """Others at each version; of version 0 there are none."""
    with_drawn_adapters(model, size=0.1 * bool(seed), seed=seed)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of the base model."""
    path = tmp_path_factory.mktemp("base")
    sharp_llama(path)
    return path


@pytest.fixture
def model(folder):
    from transformers import AutoModelForCausalLM

    return adapted(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


@pytest.fixture(scope="module")
def engine(folder, real_vllm):
    options = {"skip_tokenizer_init": True, "max_loras": MAX_LORAS, "max_lora_rank": RANK}
    with AsyncVLLM.from_pretrained(
        folder, max_model_len=1024, kv_cache_memory=1 << 28, weight_transfer=ADAPTER_BACKEND, engine_args=options
    ) as engine:
        yield engine


def held_by(engine):
    return engine._background.run(engine.llm.list_loras())


def test_requests_in_flight_over_three_versions_end_on_their_own(engine, model):
    sender = make_sender(SCHEME, model, engine)
    # Each outlives the updates that follow it.
    sampling = [SamplingConfig(max_new_tokens=500 - 100 * place, ignore_eos=True) for place in range(MAX_LORAS)]
    first = engine.policy_version

    async def run():
        requests = [asyncio.create_task(engine.generate(PROMPT, sampling[0]))]
        for seed in range(1, MAX_LORAS):
            tokens = await engine.progress() or 0
            while (await engine.progress() or 0) == tokens:  # the last one has begun
                await asyncio.sleep(0.005)
            set_adapters(model, seed)
            assert await asyncio.to_thread(sender.update_weights) == first + seed
            requests.append(asyncio.create_task(engine.generate(PROMPT, sampling[seed])))
        await asyncio.sleep(0)
        num_in_flight = engine.num_in_flight
        set_adapters(model, MAX_LORAS)
        await asyncio.to_thread(sender.update_weights)  # waits for the end of one: all adapters are in use
        return num_in_flight, held_by(engine), await asyncio.gather(*requests)

    num_in_flight, held, completions = asyncio.run(run())
    sender.shutdown()
    assert num_in_flight == MAX_LORAS
    assert len(held) == MAX_LORAS
    for seed, completion in enumerate(completions):
        assert completion.versions == [first + seed] * sampling[seed].max_new_tokens
        set_adapters(model, seed)
        own = difference_of(model, PROMPT, completion).abs()
        set_adapters(model, (seed + 1) % MAX_LORAS)
        assert own.max() < 1e-3 < 0.1 < difference_of(model, PROMPT, completion).abs().mean(), (seed, own.max())


@pytest.mark.parametrize(("pause_mode", "reason", "max_new_tokens"), [("abort", "abort", 900), ("wait", "length", 200)])
def test_an_update_ends_or_awaits_requests_as_its_option_says(engine, model, pause_mode, reason, max_new_tokens):
    sender = make_sender(VLLMWeightSyncScheme(lora="adapter", pause_mode=pause_mode), model, engine)
    set_adapters(model, 11)
    version = sender.update_weights()

    async def run():
        sampling = SamplingConfig(max_new_tokens=max_new_tokens, ignore_eos=True)
        request = asyncio.create_task(engine.generate(PROMPT, sampling))
        while not await engine.progress():
            await asyncio.sleep(0.005)
        set_adapters(model, 12)
        assert await asyncio.to_thread(sender.update_weights) == version + 1
        return await request

    completion = asyncio.run(run())
    sender.shutdown()
    assert completion.finish_reason == reason
    assert completion.versions == [version] * len(completion.token_ids)
    set_adapters(model, 11)
    assert difference_of(model, PROMPT, completion).abs().max() < 1e-3


def test_the_prefix_cache_tells_versions_apart(engine, model):
    sender = make_sender(SCHEME, model, engine)
    num_cached = []
    for seed in (7, 8):
        set_adapters(model, seed)
        sender.update_weights()
        for _ in range(2):
            [completion] = engine.generate_batch([PROMPT], SamplingConfig(max_new_tokens=8, ignore_eos=True))
            num_cached.append(completion.metrics["num_cached_tokens"])
            assert difference_of(model, PROMPT, completion).abs().max() < 1e-3
    sender.shutdown()
    assert num_cached == [0, 64, 0, 64]


def test_what_the_engine_cannot_run_is_refused_and_it_goes_on(engine, model, folder, monkeypatch):
    from transformers import AutoConfig, AutoModelForCausalLM

    sender = make_sender(SCHEME, model, engine)
    set_adapters(model, 5)
    version = sender.update_weights()
    sender.shutdown()
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=3)
    for other, what in (
        (adapted(AutoModelForCausalLM.from_config(config)), "its num_hidden_layers is 2, the trainer's is 3"),
        (adapted(AutoModelForCausalLM.from_pretrained(folder), r=16), r"rank 16, and this engine takes 8 at most"),
    ):
        with pytest.raises(EngineError, match=what):
            make_sender(SCHEME, other, engine)
    with pytest.raises(ValueError, match="lora='merged' does not fit an engine with weight_transfer='adapters'"):
        make_sender(VLLMWeightSyncScheme(), model, engine)

    sender = make_sender(SCHEME, model, engine)
    with pytest.raises(ValueError, match="this sender sends adapters alone"):
        sender.update_weights(dict(model.named_parameters()))
    with monkeypatch.context() as patch:
        patch.setattr("llmrl.weight_sync.adapters._as_file", lambda tensors: b"damaged on the way")
        with pytest.raises(WeightSyncError, match=rf"vLLM refused.*weights of version {version} as before"):
            sender.update_weights()
    [completion] = engine.generate_batch([PROMPT], SamplingConfig(max_new_tokens=8, ignore_eos=True))
    assert set(completion.versions) == {version}
    assert difference_of(model, PROMPT, completion).abs().max() < 1e-3
    set_adapters(model, 6)
    assert sender.update_weights() == version + 1
    sender.shutdown()


def base_is_trained(model):
    model.base_model.model.model.norm.weight.requires_grad_(True)


def is_merged(model):
    model.merge_adapter()


def has_two(model):
    model.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("arguments", "change", "what"),
    [
        ({"targets": ["q_proj", "embed_tokens"]}, None, "embed_tokens"),
        ({"targets": ["lm_head"]}, None, "lm_head"),
        ({"targets": ["q_proj"], "modules_to_save": ["norm"]}, None, "modules_to_save"),
        ({"targets": ["q_proj"], "use_dora": True}, None, "Dora"),
        ({"targets": ["q_proj"], "bias": "lora_only"}, None, "bias"),
        ({"targets": ["q_proj"]}, base_is_trained, "1 weights are trained beside the adapters, among them model.norm"),
        ({"targets": ["q_proj"]}, is_merged, r"q_proj is merged into its weight: call model.unmerge_adapter"),
        ({"targets": ["q_proj"]}, has_two, "2 active adapters"),
        (None, None, "has none, so that all its weights are trained"),
    ],
)
def test_adapters_that_cannot_be_sent_alone_are_refused_by_name(tmp_path, arguments, change, what):
    model = sharp_llama(tmp_path)
    if arguments is not None:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model = adapted(model, **arguments)
    if change is not None:
        change(model)
    sender = SCHEME.create_sender()
    sender.register_model(model)
    engine = FakeEngine()
    engine.weight_transfer_backend = ADAPTER_BACKEND
    with pytest.raises(TypeError, match=re.escape(what) if "." not in what else what):
        sender.init_all_workers_group(engine=engine)
    assert engine.calls == []


class KeepsAdapters(FakeEngine):
    """Notes what it is sent, in place of vLLM."""

    weight_transfer_backend = ADAPTER_BACKEND
    model_dtype = torch.float32
    adapter = None

    def update_weights(self, info):
        super().update_weights(info)
        self.adapter = info.get("weights")


def test_a_replica_in_the_place_of_a_dead_one_is_given_the_adapter_before_it_serves(tmp_path):
    model = adapted(sharp_llama(tmp_path), ["q_proj"])
    replicas = EngineReplicas([KeepsAdapters(), KeepsAdapters()], restart=lambda index: KeepsAdapters())
    sender = make_sender(SCHEME, model, replicas)
    assert sender.update_weights() == 1
    survivor, dead = replicas
    dead.shutdown()
    replicas.refresh()
    wait_until(lambda: replicas.serving == {0, 1})
    assert replicas[1] is not dead
    assert replicas[1].policy_version == 1
    assert replicas[1].adapter == survivor.adapter is not None
    assert {"pause", "resume", "reset_prefix_cache"}.isdisjoint(survivor.names), "requests in flight are left alone"
    sender.shutdown()


def test_what_a_trainer_sends_is_what_peft_saves(tmp_path):
    """Scaled, since A and B are sent without `alpha / r`: of ranks and alphas by layer, too."""
    from safetensors.torch import load, load_file

    options = {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 5}, "use_rslora": True}
    model = adapted(sharp_llama(tmp_path), ["q_proj", "v_proj", "down_proj"], **options)
    engine = KeepsAdapters()
    sender = make_sender(SCHEME, model, engine)
    sender.update_weights()
    sender.shutdown()
    model.save_pretrained(tmp_path / "peft")
    expected, sent = load_file(tmp_path / "peft/adapter_model.safetensors"), load(engine.adapter)
    assert sent.keys() == expected.keys()
    for name, weight in expected.items():
        alpha, rank = (5 if "down_proj" in name else 6), (2 if "v_proj" in name else RANK)
        scale = alpha / rank**0.5 if "lora_B" in name else 1
        torch.testing.assert_close(sent[name], weight * scale)


def test_engines_and_schemes_that_cannot_take_adapters_say_so(tmp_path):
    model = adapted(sharp_llama(tmp_path), ["q_proj"])
    with pytest.raises(ValueError, match=r"weight_transfer='nccl'.*lora='adapter' to engines started with"):
        make_sender(SCHEME, model, FakeEngine())
    with pytest.raises(ValueError, match="the files hold all of a model's weights"):
        VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), lora="adapter")
    with pytest.raises(ValueError, match="lora must be 'merged' or 'adapter'"):
        VLLMWeightSyncScheme(lora="adapters")
    with pytest.raises(ValueError, match="not that of the registered model"):
        sender = SCHEME.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(torch.nn.Linear(2, 2)), KeepsAdapters())


@pytest.mark.parametrize(
    ("engine_args", "options", "what"),
    [
        ({"max_loras": 1}, {}, "max_loras must be at least 2, got 1"),
        ({"max_lora_rank": 1000}, {}, "max_lora_rank must be at most 512, got 1000"),
        ({"enable_lora": True}, {}, "pass weight_transfer= to from_pretrained"),
        ({}, {"enable_sleep": True}, "weight_transfer='adapters' cannot give it weights when it wakes up"),
    ],
)
def test_engines_that_could_not_hold_adapters_are_refused(takes_long, engine_args, options, what):
    options = {"weight_transfer": ADAPTER_BACKEND, "engine_args": engine_args, **options}
    with pytest.raises((EngineError, TypeError), match=what):
        build_engine_args("x", options, is_cpu=False)


def test_a_model_with_experts_is_refused_on_a_cpu(takes_long, real_vllm):
    """vLLM would end at the first request: its adapters of experts, which it puts around them anyway, want Triton."""
    config = SimpleNamespace(get_num_experts=lambda: 4, hf_text_config=SimpleNamespace())
    lora = SimpleNamespace(max_loras=2, max_lora_rank=8)
    updates = AdapterUpdates(SimpleNamespace(vllm_config=SimpleNamespace(lora_config=lora, model_config=config)))
    with pytest.raises(ValueError, match="no adapters in a model with experts on a CPU"):
        asyncio.run(updates.open_transfer({"model": {}, "rank": 4, "zeros": b""}))


def test_an_engine_has_room_for_the_next_rank_that_vllm_knows(takes_long):
    options = {"weight_transfer": ADAPTER_BACKEND, "engine_args": {"max_lora_rank": 20}}
    arguments = build_engine_args("x", options, is_cpu=True)
    assert (arguments.enable_lora, arguments.max_loras, arguments.max_lora_rank) == (True, 4, 32)
    assert arguments.weight_transfer_config is None
