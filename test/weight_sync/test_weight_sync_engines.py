"""Engines that hold weights in another form than the trainer: each takes every weight, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engine_checkpoints import write_checkpoint
from engine_halves import is_shown, nats_after_update
from weight_sync_tools import (
    assert_each_weight_arrives,
    change_every_parameter,
    log_prob_difference,
    make_sender,
    out_of_reach,
    sharp_llama,
)

from llmrl._utils.background_loop import BackgroundLoop
from llmrl.engines import AsyncVLLM
from llmrl.engines.load import LoadMeter
from llmrl.engines.vllm.arguments import build_engine_args
from llmrl.weight_sync import EngineGroup, VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError

pytestmark = pytest.mark.usefixtures("imports_vllm")

TOLERANCE, STALE = 0.15, 1.0
"""Mean log-prob difference of a bfloat16 engine with these sharp random weights, and of one with other weights."""


@pytest.fixture(scope="module")
def experts(real_vllm, tmp_path_factory):
    """A random mixture of experts with a head of its own, and an engine that computes its logits in float32."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, tie_word_embeddings=False,
        initializer_range=0.2,
    )  # fmt: skip
    model, path = Qwen3MoeForCausalLM(config), tmp_path_factory.mktemp("experts")
    model.to(torch.bfloat16).save_pretrained(path)
    engine_args = {"skip_tokenizer_init": True, "hf_overrides": {"head_dtype": "float32"}}
    with AsyncVLLM.from_pretrained(
        path, max_model_len=512, kv_cache_memory=1 << 26, cpu_threads=1, engine_args=engine_args
    ) as engine:
        yield model.float().eval(), engine


class TestExpertsAndAFloat32Head:
    def test_every_parameter_arrives_and_a_head_left_behind_would_be_seen(self, experts):
        model, engine = experts
        assert engine.llm.vllm_config.model_config.head_dtype is torch.float32
        assert log_prob_difference(model, engine) < TOLERANCE
        old_head = model.lm_head.weight.detach().clone()
        change_every_parameter(model, seed=1, size=0.3)
        assert log_prob_difference(model, engine) > STALE
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        sender.update_weights()
        sender.shutdown()
        assert log_prob_difference(model, engine) < TOLERANCE

        def with_old_head(token_ids):
            return SimpleNamespace(logits=model.model(token_ids).last_hidden_state @ old_head.T)

        assert log_prob_difference(with_old_head, engine) > 2 * TOLERANCE

    def test_each_weight_arrives_on_its_own(self, experts):
        """vLLM packs experts for its kernel; those of an update would be read as packed, and were not."""
        model, engine = experts
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        names = [name for name, _ in model.named_parameters()]
        assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.gate.weight", "lm_head.weight"} <= {
            *names
        }
        assert_each_weight_arrives(model, engine, sender, names, tolerance=TOLERANCE)
        sender.shutdown()

    def test_missing_experts_are_refused(self, experts):
        model, engine = experts
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        version = sender.update_weights()
        weights = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        del weights["model.layers.0.mlp.experts.down_proj"]
        with pytest.raises(WeightSyncError, match=f"w2_weight.*hold the weights of version {version} as before"):
            sender.update_weights(weights)
        assert log_prob_difference(model, engine) < TOLERANCE
        sender.shutdown()


def test_weights_that_vllms_class_fills_itself_arrive_at_each_update(real_vllm, tmp_path):
    """Sinks and experts of gpt-oss pass by the loaders that vLLM's reload wraps."""
    write_checkpoint("gpt_oss", "GptOssForCausalLM", tmp_path)
    assert is_shown(nats_after_update(tmp_path))


@pytest.fixture(scope="module")
def two_workers(real_vllm, tmp_path_factory):
    """A model, and an engine that splits it between two processes."""
    path = tmp_path_factory.mktemp("tiny")
    model = sharp_llama(path)
    engine_args = {"skip_tokenizer_init": True, "tensor_parallel_size": 2}
    with AsyncVLLM.from_pretrained(
        path, max_model_len=512, kv_cache_memory=1 << 26, cpu_threads=1, engine_args=engine_args
    ) as engine:
        assert engine.num_workers == 2
        yield model, engine


class TestTensorParallelWorkers:
    def test_each_weight_reaches_every_worker(self, two_workers):
        model, engine = two_workers
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        names = [name for name, _ in model.named_parameters() if "layers.1" not in name]
        assert_each_weight_arrives(model, engine, sender, names, tolerance=TOLERANCE)
        sender.shutdown()

    @pytest.mark.parametrize("way", ["gloo", "double buffer"])
    @pytest.mark.parametrize("anchor_every", [1, 4], ids=["all weights", "deltas"])
    def test_every_way_reaches_every_worker(self, two_workers, monkeypatch, tmp_path, way, anchor_every):
        model, engine = two_workers
        if way == "gloo":
            out_of_reach(monkeypatch)
        is_file = way == "double buffer"
        files = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path), anchor_every=anchor_every)
        scheme = files if is_file else VLLMWeightSyncScheme(anchor_every=anchor_every)
        sender = make_sender(scheme, model, engine)
        change_every_parameter(model, seed=len(way), size=0.3)
        assert log_prob_difference(model, engine) > STALE
        sender.update_weights()
        assert log_prob_difference(model, engine) < TOLERANCE
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[::61] *= -3
        assert log_prob_difference(model, engine) > STALE
        sender.update_weights()
        sender.shutdown()
        assert log_prob_difference(model, engine) < TOLERANCE

    def test_all_workers_are_heard_when_they_refuse_an_update(self, two_workers):
        """Were the answer of one left behind, the next update would be taken for refused."""
        model, engine = two_workers
        sender = make_sender(VLLMWeightSyncScheme(), model, engine)
        version = sender.update_weights()
        for _ in range(2):
            with pytest.raises(WeightSyncError, match=f"does not take these.*version {version} as before"):
                sender.update_weights({"model.extra.weight": torch.zeros(3)})
        assert log_prob_difference(model, engine) < TOLERANCE
        change_every_parameter(model, seed=7, size=0.3)
        assert sender.update_weights() == version + 1
        assert log_prob_difference(model, engine) < TOLERANCE
        sender.shutdown()


@pytest.mark.parametrize(
    ("engine_args", "in_checkpoint"),
    [
        ({"quantization": "fp8_per_tensor"}, None),
        ({"quantization": "int8_per_channel_weight_only"}, None),
        ({}, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    ],
)
def test_a_quantised_engine_is_refused(tiny_model_path, tmp_path, engine_args, in_checkpoint):
    """Whether the argument says so or the checkpoint; nothing is loaded for it."""
    config = json.loads(Path(tiny_model_path, "config.json").read_text())
    if in_checkpoint is not None:
        config["quantization_config"] = in_checkpoint
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine_args = engine_args | {"skip_tokenizer_init": True}
    options = {"dtype": "bfloat16", "kv_cache_memory": 1 << 26, "engine_args": engine_args}
    arguments = build_engine_args(str(tmp_path), options, is_cpu=True)
    llm = SimpleNamespace(vllm_config=arguments.create_engine_config(), errored=False, shutdown=lambda: None)
    background = BackgroundLoop("test")
    engine = AsyncVLLM(llm, background, LoadMeter(), weight_transfer="llmrl", start_s=0.0)
    try:
        with pytest.raises(ValueError, match=r"an engine is quantised .*start the engine without quantization"):
            EngineGroup(engine)
    finally:
        background.close()
