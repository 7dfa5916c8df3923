"""Trainers of every kind: adapters merged on the way, weights sharded over processes gathered one by one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from llmrl.weight_sync import get_model_metadata
from llmrl.weight_sync.source import named_weights


def small_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True,
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
        [({"use_dora": True}, "DoRA"), ({"bias": "all"}, "biases"), ({"modules_to_save": ["lm_head"]}, "modules")],
    )
    def test_what_is_more_than_lora_is_refused(self, peft, options, message):
        model = peft.get_peft_model(small_llama(), peft.LoraConfig(target_modules=["q_proj"], **options))
        with pytest.raises(TypeError, match=message):
            list(named_weights(model))

    def test_other_adapters_are_refused(self, peft):
        config = peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        with pytest.raises(TypeError, match="only LoRA"):
            list(named_weights(peft.get_peft_model(small_llama(), config)))


SHARDED = """
import json, sys
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from llmrl.engines.base import EngineError
from llmrl.weight_sync import VLLMWeightSyncScheme, WeightSyncError, get_model_metadata
from llmrl.weight_sync.packing import PackedLayout
from llmrl.weight_sync.shared_memory import open_shared

rank, port, world_size = int(sys.argv[1]), sys.argv[2], 2
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
torch.manual_seed(0)
whole = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
expected = {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
for layer in whole:
    fully_shard(layer, mesh=mesh)
fully_shard(whole, mesh=mesh)

# How many gathered weights live at once.
gather, living, most = DTensor.full_tensor, [], [0]
def counted(tensor, **options):
    import weakref
    result = gather(tensor, **options)
    living.append(weakref.ref(result))
    living[:] = [one for one in living if one() is not None]
    most[0] = max(most[0], len(living))
    return result
DTensor.full_tensor = counted

class Engine:
    weight_transfer_backend, model_dtype, quantization = "llmrl", torch.bfloat16, None
    num_workers, policy_version, is_alive, fails = 1, 0, True, False
    def pause(self, mode, *, clear_cache): pass
    def resume(self): pass
    def reset_prefix_cache(self, *, reset_running_requests): return True
    def init_weight_transfer_engine(self, info): pass
    def start_weight_update(self): pass
    def update_weights(self, info):
        if self.fails:
            raise EngineError("no room")
        if not info.get("is_discarded"):
            layout = PackedLayout.from_plain(info["names"], info["dtype_names"], info["shapes"])
            buffer = open_shared(info["path"], info["num_bytes"])
            self.taken = {name: tensor.clone() for name, tensor in layout.views(buffer)}
    def finish_weight_update(self, version):
        self.policy_version = int(version)

engine = Engine()
sender = VLLMWeightSyncScheme(rank=rank).create_sender()
sender.register_model(whole)
sender.init_all_workers_group(get_model_metadata(whole), engine if rank == 0 else None)
versions = [sender.update_weights(), sender.update_weights()]
engine.fails, message = True, ""
try:
    sender.update_weights()
except WeightSyncError as error:
    message = str(error)
engine.fails = False
versions.append(sender.update_weights())
is_right = rank > 0 or all(torch.equal(engine.taken[n], t.to(torch.bfloat16)) for n, t in expected.items())
is_sharded = all(p.to_local().numel() * 2 == p.numel() for p in whole.parameters())
sender.shutdown()
print(json.dumps({"versions": versions, "message": message, "is_right": is_right, "most": most[0],
                  "is_sharded": is_sharded}))
torch.distributed.destroy_process_group()
"""


def test_sharded_weights_are_gathered_one_by_one_and_every_rank_hears_of_the_outcome():
    """FSDP2 over two gloo processes: rank 0 sends, rank 1 helps to gather, both learn versions and failures."""
    pytest.importorskip("vllm")
    from llmrl.weight_sync.gloo import free_port

    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for output, _ in outputs:
        result = json.loads(output.splitlines()[-1])
        assert result["versions"] == [1, 2, 3]
        assert "no room" in result["message"] and "version 2 as before" in result["message"]
        assert result["is_sharded"] and result["is_right"]
        assert result["most"] <= 2  # the one that is copied, and the one that takes its place


def test_ranks_above_0_take_no_engine():
    from llmrl.weight_sync import VLLMWeightSyncScheme

    sender = VLLMWeightSyncScheme(rank=1).create_sender()
    sender.register_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="rank 1 has no engine"):
        sender.init_all_workers_group(None, object())
