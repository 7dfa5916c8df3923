"""Trainers of every kind: adapters merged on the way, weights sharded over processes gathered one by one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from warm_processes import WarmPopen
from weight_sync_tools import TakingEngine

from llmrl.weight_sync import get_model_metadata
from llmrl.weight_sync.source import named_weights


def small_llama(*, is_tied=True):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=is_tied,
        )
    )  # fmt: skip


class TestAdapters:
    @pytest.fixture
    def peft(self):
        return pytest.importorskip("peft")

    def test_lora_is_merged_on_the_way_and_the_model_is_left_as_it_is(self, peft):
        plain = small_llama()
        expected_names = [name for name, _ in plain.named_parameters()]
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
        model = peft.get_peft_model(plain, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        metadata = get_model_metadata(model, torch.bfloat16)
        sent = {name: tensor.clone() for name, tensor in named_weights(model)}
        assert list(sent) == list(metadata) == expected_names
        assert all(metadata[name] == (torch.bfloat16, sent[name].shape) for name in sent)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        base = (
            sent["model.layers.0.self_attn.q_proj.weight"]
            - before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"]
        )
        assert base.abs().max() > 0.1, "the adapter changes nothing"
        merged = dict(model.merge_and_unload().named_parameters())
        for name in sent:
            torch.testing.assert_close(sent[name], merged[name].detach())

    def test_an_adapter_that_is_merged_already_is_not_added_again(self, peft):
        model = peft.get_peft_model(small_llama(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        unmerged = {name: tensor.clone() for name, tensor in named_weights(model)}
        model.merge_adapter()
        for name, tensor in named_weights(model):
            torch.testing.assert_close(tensor, unmerged[name])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"use_dora": True}, "q_proj is not plain LoRA of a weight \\(Dora"),
            ({"bias": "all"}, "biases"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
            ({"trainable_token_indices": [3]}, "trainable_token_indices"),
            ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "a bare parameter"),
            ({"target_modules": ["q_proj", "lm_head"]}, "lm_head is adapted and shares its weight"),
            ({"target_modules": ["embed_tokens"]}, "embed_tokens is adapted and shares its weight"),
        ],
    )
    def test_what_a_sum_with_the_update_would_leave_out_is_refused(self, peft, options, message):
        model = peft.get_peft_model(small_llama(), peft.LoraConfig(**{"target_modules": ["q_proj"], **options}))
        with pytest.raises(TypeError, match=message):
            list(named_weights(model))

    def test_an_adapted_embedding_is_merged(self, peft):
        plain = small_llama(is_tied=False)
        before = plain.model.embed_tokens.weight.detach().clone()
        config = peft.LoraConfig(target_modules=["embed_tokens", "lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(plain, config)
        sent = {name: tensor.clone() for name, tensor in named_weights(model)}
        assert not torch.equal(sent["model.embed_tokens.weight"], before)
        merged = dict(model.merge_and_unload().named_parameters())
        assert list(sent) == list(merged)
        for name in sent:
            torch.testing.assert_close(sent[name], merged[name].detach())

    def test_a_bias_of_lora_is_refused(self, peft):
        model = torch.nn.ModuleDict({"linear": torch.nn.Linear(3, 2)})
        config = peft.LoraConfig(target_modules=["linear"], lora_bias=True)
        with pytest.raises(TypeError, match="a bias"):
            list(named_weights(peft.get_peft_model(model, config)))

    def test_other_adapters_are_refused(self, peft):
        config = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        with pytest.raises(TypeError, match="only LoRA"):
            list(named_weights(peft.get_peft_model(small_llama(), config)))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, own_programs):
    """What two gloo processes with a sharded model report, rank 0 first."""
    pytest.importorskip("vllm")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("sharded")
    script = Path(__file__).parents[1] / "helpers" / "sharded_sender.py"
    processes = [
        WarmPopen(
            [sys.executable, script, str(rank), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_sharded_weights_are_gathered_one_by_one_and_every_rank_gets_the_outcome(sharded, kind):
    """FSDP2 over two processes: rank 0 sends, rank 1 helps to gather, both learn versions and failures."""
    for result in (ranks[kind] for ranks in sharded):
        assert result["versions"] == [1, 2, 3]
        assert "no room" in result["message"] and "version 2 as before" in result["message"]
        assert result["is_sharded"] and result["is_right"]


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_every_rank_knows_the_length_of_the_engine_that_rank_0_has(sharded, kind):
    """All ranks choose the same rotary frequencies by it."""
    assert [ranks[kind]["engine_length"] for ranks in sharded] == [TakingEngine.max_model_len] * 2


@pytest.mark.parametrize("kind", ["plain", "lora"])
def test_no_rank_holds_the_whole_model_twice(sharded, kind):
    """Two gathered weights at most; rank 0 packs them into one copy in the engine's dtype, rank 1 keeps nothing."""
    for rank, result in enumerate(ranks[kind] for ranks in sharded):
        assert result["most_gathered"] <= 2  # the one that is copied, and the one that takes its place
        whole = result["whole_bytes"]
        packed = whole // 2 if rank == 0 else 0
        assert result["peak_growth"] < packed + whole // 4


def test_a_file_is_written_one_weight_at_a_time(sharded):
    for result in sharded:
        assert result["peak_growth_of_write"] < result["lora"]["whole_bytes"] // 4


def test_a_rank_that_fails_before_it_gathers_leaves_no_other_waiting(sharded):
    for result in sharded:
        assert "Not a directory" in result["failed_write"]
        assert result["version_written"] == 1


def test_ranks_above_0_take_no_engine():
    from llmrl.weight_sync import VLLMWeightSyncScheme

    sender = VLLMWeightSyncScheme(rank=1).create_sender()
    sender.register_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="rank 1 has no engine"):
        sender.init_all_workers_group(None, object())
