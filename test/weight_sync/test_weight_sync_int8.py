"""Engines in int8 beside a float32 trainer: its weights are rounded on the way, and how far that is off is known."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
import torch
from weight_sync_tools import FakeEngine, differences_of, make_sender, out_of_reach, set_noisy, sharp_llama, weights_of

from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.engines.vllm.quantized import INT8, checkpoint_for, is_int8, to_int8, write_int8_checkpoint
from llmrl.trainer.trained_model import trained_model
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
from llmrl.weight_sync.int8 import Int8Weights

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def arguments_of(strategy):
    """What compressed-tensors calls symmetric int8 with one scale for each `channel` or `token`."""
    compressed = pytest.importorskip("compressed_tensors.quantization")
    return compressed.QuantizationArgs(
        num_bits=8, type="int", symmetric=True, strategy=strategy, dynamic=strategy == "token"
    )


def rounded(values, strategy):
    """What compressed-tensors makes of values: rounded to int8 and back."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    arguments = arguments_of(strategy)
    scale, zero_point = calculate_qparams(values.amin(-1, keepdim=True), values.amax(-1, keepdim=True), arguments)
    return fake_quantize(values, scale, zero_point, arguments)


def in_int8(model):
    """The model with linear layers, but the head, that round weights by channel and inputs by token."""
    model = copy.deepcopy(model)
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = rounded(layer.weight.data, "channel")
            layer.register_forward_pre_hook(lambda layer, inputs: (rounded(inputs[0], "token"),))
    return model


@pytest.fixture(scope="module")
def engine(model_path, real_vllm):
    with AsyncVLLM.from_pretrained(
        model_path, quantization="int8", max_model_len=128, kv_cache_memory=1 << 26, cpu_threads=1
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(tokenizer):
    texts = ("The capital of France is Paris, a", "Water boils at a hundred degrees", "My favourite dish is one of")
    ids = [tokenizer.encode(text) for text in texts]
    return [one[: min(map(len, ids))] for one in ids]


def test_a_trainers_weights_are_rounded_on_the_way_to_the_real_model(
    engine, reference_model, prompts, tmp_path, monkeypatch
):
    """Once it has been given other weights and its first ones again, it answers as it did before, bit by bit."""
    assert (engine.quantization, engine.get_tokenizer().vocab_size > 40_000) == (INT8, True)
    model, original = copy.deepcopy(reference_model), weights_of(reference_model)

    def sample():
        return engine.generate_batch(prompts, SamplingConfig(max_new_tokens=32, ignore_eos=True))

    def off(model, completions):
        return differences_of(model, prompts, completions)

    def scores():
        return asyncio.run(engine.score(prompts[0] + prompts[1], top_k=2))

    first = scores().log_probs
    assert first.min() < -1
    for seed, way in enumerate(("shared memory", "gloo", "double buffer"), 1):
        if way == "gloo":
            out_of_reach(monkeypatch)
        is_file = way == "double buffer"
        scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path)) if is_file else VLLMWeightSyncScheme()
        sender = make_sender(scheme, model, engine)
        set_noisy(model, original, seed=seed, size=0.1)
        sender.update_weights()
        if seed == 1:
            completions = sample()
            own = off(model, completions)
            by_reference = (off(in_int8(model), completions) - own).abs().mean()
            assert 0.5 * by_reference < own.abs().mean() < 2 * by_reference < 1, (own, by_reference)
        assert (scores().log_probs - first).abs().mean() > 1, way
        set_noisy(model, original, seed=0, size=0)
        sender.update_weights()
        sender.shutdown()
        assert torch.equal(scores().log_probs, first), way
    assert trained_model(model).is_engine_int8


def test_rounded_weights_are_those_of_compressed_tensors():
    """By its own choice of scales, absmax / 127.5, the ends of a row are cut; by ours the error is no larger."""
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize

    weight = torch.randn(40, 33, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 3, 40)[:, None]
    weight[3] = 0
    values, scale = to_int8(weight)
    assert values.dtype == torch.int8 and scale.shape == (40, 1) and scale.dtype == torch.float32
    zero, arguments = torch.zeros_like(scale, dtype=torch.int8), arguments_of("channel")
    assert torch.equal(quantize(weight, scale, zero, arguments, dtype=torch.int8), values)
    error = (dequantize(values, scale, zero, arguments) - weight).double().abs()
    assert (error <= weight.double().abs().amax(1, keepdim=True) / 254 * (1 + 1e-5)).all()
    theirs = (rounded(weight, "channel") - weight).double()
    assert error.square().sum() < 1.02 * theirs.square().sum()


def test_a_checkpoint_is_written_in_int8_file_by_file(tmp_path):
    from safetensors.torch import load_file

    source, target = tmp_path / "source", tmp_path / "target"
    model = sharp_llama(source, is_tied=False).to(torch.bfloat16)
    model.save_pretrained(source, max_shard_size="200KB")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    target.mkdir()
    write_int8_checkpoint(source, target)
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2 and "model.safetensors" in {path.name for path in source.iterdir()} - set(files)
    assert not (target / "model.safetensors.index.json").exists()
    assert (target / "chat_template.jinja").read_text() == "{{ messages }}"
    config = json.loads((target / "config.json").read_text())
    assert is_int8(config["quantization_config"]) and config["vocab_size"] == 512
    written = {name: weight for file in files for name, weight in load_file(target / file).items()}
    expected = set(model.state_dict())
    expected |= {f"{name}_scale" for name in expected if name.split(".")[-2] in PROJECTIONS}
    assert written.keys() == expected
    for name, weight in model.state_dict().items():
        if f"{name}_scale" in written:
            error = (written[name] * written[f"{name}_scale"] - weight.float()).abs()
            assert (error <= 0.501 * written[f"{name}_scale"]).all()
        else:
            assert torch.equal(written[name], weight)
    # What is sent to an engine is the same.
    for name, weight in Int8Weights(model, torch.bfloat16):
        assert torch.equal(weight, written[name]), name


def test_what_cannot_be_rounded_is_refused_before_the_engine_starts(tmp_path):
    def start(model, quantization="int8", *, is_cpu=True, takes_adapters=False):
        with checkpoint_for(str(model), quantization, is_cpu=is_cpu, takes_adapters=takes_adapters):
            pass

    start("anything", None, is_cpu=False)
    with pytest.raises(ValueError, match=r"must be 'int8', for an engine on a CPU, or None: .*got 'int8' on a GPU"):
        start(tmp_path, is_cpu=False)
    with pytest.raises(ValueError, match="got 'fp8' on a CPU"):
        start(tmp_path, "fp8")
    with pytest.raises(ValueError, match="vLLM runs no adapters over layers in int8"):
        start(tmp_path, takes_adapters=True)
    with pytest.raises(ValueError, match=r"needs a folder with config\.json"):
        start("owner/a-name-of-a-hub")
    sharp_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ValueError, match="is quantised already"):
        start(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks the weight model\.layers\.2\."):
        start(tmp_path)


def quantization_config():
    """As quantisers write it, with more entries than count."""
    weights, activations = (arguments_of(strategy).model_dump(mode="json") for strategy in ("channel", "token"))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "value"),
    [("format", "pack-quantized"), ("ignore", []), ("ignore", ["lm_head", "model.layers.0.mlp.gate"])],
)
def test_other_formats_are_distinguished(entry, value):
    assert is_int8(quantization_config())
    assert not is_int8({**quantization_config(), entry: value})
    for part, name, other in (
        ("weights", "num_bits", 4), ("weights", "strategy", "group"), ("weights", "symmetric", False),
        ("input_activations", "dynamic", False), ("input_activations", "type", "float"),
    ):  # fmt: skip
        changed = quantization_config()
        changed["config_groups"]["group_0"][part][name] = other
        assert not is_int8(changed)


@pytest.mark.parametrize(
    ("quantization", "backend"), [("awq", "llmrl"), (INT8, "nccl"), (INT8, "adapters"), (INT8, "files")]
)
def test_other_quantised_engines_are_refused_by_name(tmp_path, quantization, backend):
    engine = FakeEngine()
    engine.quantization, engine.weight_transfer_backend = quantization, backend
    with pytest.raises(ValueError, match=rf"is quantised \({quantization}, weight_transfer='{backend}'\)"):
        make_sender(VLLMWeightSyncScheme(), sharp_llama(tmp_path), engine)


def test_weights_that_cannot_be_rounded_are_refused(tmp_path):
    model, engine = sharp_llama(tmp_path), FakeEngine()
    engine.quantization, engine.weight_transfer_backend = INT8, "llmrl"
    with pytest.raises(ValueError, match="engines in int8 take the weights of a whole model"):
        make_sender(VLLMWeightSyncScheme(), dict(model.named_parameters()), engine)
    with pytest.raises(ValueError, match="must share one quantization, got None and int8"):
        plain = FakeEngine()
        plain.model_dtype, plain.weight_transfer_backend = engine.model_dtype, "llmrl"
        make_sender(VLLMWeightSyncScheme(), model, [engine, plain])
    model.experts = torch.nn.ParameterList([torch.ones(2, 3, 4)])
    with pytest.raises(ValueError, match=r"experts\.0 is the matrix of another"):
        make_sender(VLLMWeightSyncScheme(), model, engine)


def test_adapters_are_merged_before_they_are_rounded(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(sharp_llama(tmp_path), config)
    name, sent = "model.layers.0.self_attn.q_proj.weight", dict(Int8Weights(model))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    merged = layer.base_layer.weight + 8 / 8 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    scale = sent[f"{name}_scale"]
    assert ((sent[name] * scale - merged).abs() <= scale * 0.501).all()
    assert sent["model.embed_tokens.weight"].dtype == torch.float32
    assert [meta.name for meta in Int8Weights(model).metadata()] == list(sent)
