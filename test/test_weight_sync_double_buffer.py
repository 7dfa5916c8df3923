"""The double buffer: one of its two halves is always whole, and the engine loads nothing else."""

from __future__ import annotations

import json

import pytest
import torch

from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.weight_sync import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme, WeightSyncError, get_model_metadata
from llmrl.weight_sync.double_buffer import DoubleBuffer


def test_writes_alternate_and_the_last_one_is_read(tmp_path):
    buffer = DoubleBuffer(tmp_path)
    assert buffer.pointer() is None
    pointers = [buffer.write({"w": torch.full((3,), float(value))}) for value in range(3)]
    assert [pointer.slot for pointer in pointers] == [0, 1, 0]
    assert [pointer.serial for pointer in pointers] == [1, 2, 3]
    assert buffer.read(buffer.pointer())["w"].tolist() == [2.0] * 3
    assert buffer.read(pointers[1])["w"].tolist() == [1.0] * 3


def test_what_is_not_whole_is_refused(tmp_path):
    buffer = DoubleBuffer(tmp_path)
    with pytest.raises(ValueError, match="nothing was written"):
        buffer.read(None)
    pointer = buffer.write({"w": torch.ones(8)})
    path = buffer.path(pointer.slot)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        buffer.read(pointer)
    path.write_bytes(data[:-4])
    with pytest.raises(ValueError, match="size"):
        buffer.read(pointer)
    (tmp_path / "current.json").write_text('{"slot": 0')
    with pytest.raises(ValueError, match="damaged"):
        buffer.pointer()


def test_a_writer_that_dies_half_way_leaves_the_current_weights(tmp_path, monkeypatch):
    buffer = DoubleBuffer(tmp_path)
    buffer.write({"w": torch.ones(2)})

    def die(pointer):
        raise KeyboardInterrupt

    monkeypatch.setattr(buffer, "point_to", die)
    with pytest.raises(KeyboardInterrupt):
        buffer.write({"w": torch.zeros(2)})
    again = DoubleBuffer(tmp_path)
    assert again.read(again.pointer())["w"].tolist() == [1.0, 1.0]


def test_a_tied_model_is_synced_and_a_damaged_buffer_is_undone(tmp_path):
    pytest.importorskip("vllm")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model.float()

    def difference(engine):
        [completion] = engine.generate_batch([[1, 2, 3]], SamplingConfig(max_new_tokens=64, ignore_eos=True, seed=0))
        with torch.no_grad():
            logits = model(torch.tensor([[1, 2, 3, *completion.token_ids]])).logits[0, 2:-1]
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        return (torch.tensor(completion.log_probs) - log_probs).abs().mean().item()

    scheme = VLLMDoubleBufferSyncScheme(remote_addr=str(tmp_path / "buffer"))
    sender = scheme.create_sender()
    sender.register_model(model)
    with AsyncVLLM.from_pretrained(
        tmp_path / "model",
        max_model_len=256,
        kv_cache_memory=1 << 26,
        weight_transfer="llmrl_double_buffer",
        engine_args={"skip_tokenizer_init": True},
    ) as engine:
        with pytest.raises(ValueError, match="go together"):
            other = VLLMWeightSyncScheme().create_sender()
            other.register_model(model)
            other.init_all_workers_group(None, engine)
        sender.init_all_workers_group(get_model_metadata(model), engine)
        before = difference(engine)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        stale = difference(engine)
        assert stale > 5 * before
        assert sender.update_weights() == 1
        assert difference(engine) < stale / 4

        write = DoubleBuffer.write

        def write_damaged(buffer, weights):
            pointer = write(buffer, {name: torch.zeros_like(weight) for name, weight in weights.items()})
            with buffer.path(pointer.slot).open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"\x01")
            return pointer

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DoubleBuffer, "write", write_damaged)
            with pytest.raises(WeightSyncError, match="version 1 as before"):
                sender.update_weights()
        assert engine.policy_version == 1
        assert difference(engine) < stale / 4
        assert json.loads((tmp_path / "buffer" / "current.json").read_text())["serial"] == 1
        assert sender.update_weights() == 2
