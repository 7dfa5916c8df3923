"""Checkpoints with images: their language models are trained, and saved with the encoders as they were."""

import copy

import pytest
import torch
import transformers
from causal_types import tiny_config
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from llmrl._utils.model_parts import class_with_images
from llmrl.runs.exports import write_model
from llmrl.runs.model_files import ExportedModel
from llmrl.trainer import TransformersWrapper, load_model, shard_model
from llmrl.trainer.loading import LoRAConfig
from llmrl.weight_sync import get_model_metadata
from llmrl.weight_sync.source import ModelWeights

CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "gemma3": "Gemma3ForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
}


def save_whole(model_type, folder):
    """Write a random checkpoint in the official form of its class, and return its weights by name."""
    torch.manual_seed(0)
    kind = getattr(transformers, CLASSES[model_type])
    config = tiny_config(model_type)
    if model_type == "qwen3_vl_moe":  # a square one would not show in which layout it is
        config.text_config.moe_intermediate_size = 24
    model = kind(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if model_type == "qwen3_vl_moe":  # the official layout, [num_experts, num_inputs, num_outputs]
        for name in [name for name in weights if ".mlp.experts." in name]:
            weights[name] = weights[name].transpose(1, 2).contiguous()
        shape = weights["model.language_model.layers.0.mlp.experts.down_proj"].shape
        assert shape == (4, 24, config.text_config.hidden_size)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return weights


@pytest.fixture(params=CLASSES)
def checkpoint(request, tmp_path):
    return request.param, tmp_path / "whole", save_whole(request.param, tmp_path / "whole")


def test_a_class_that_official_checkpoints_name_otherwise_is_found():
    config = tiny_config("kimi_k25")
    config.architectures = ["KimiK25ForConditionalGeneration"]
    assert class_with_images(config).__name__ == "Kimi_K25ForConditionalGeneration"


def is_of_encoder(name):
    return any(part in name for part in ("visual.", "vision_tower.", "multi_modal_projector.", "image_newline"))


def test_the_language_model_alone_is_loaded_and_sent_by_the_names_of_the_checkpoint(checkpoint):
    _, folder, weights = checkpoint
    model = load_model(folder)
    assert not any(is_of_encoder(name) for name, _ in model.named_parameters())
    expected = {name: tensor for name, tensor in weights.items() if not is_of_encoder(name)}
    assert len(expected) < len(weights)
    source = ModelWeights(model, torch.bfloat16)
    sent = dict(source)
    assert sent.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(sent[name], tensor), name
    source.override = expected  # as `update_weights(weights)` does
    assert dict(source).keys() == {meta.name for meta in source.metadata()} == expected.keys()
    metadata = get_model_metadata(model, torch.bfloat16)
    assert metadata == {name: (tensor.dtype, tensor.shape) for name, tensor in expected.items()}
    assert list(metadata) == list(sent)


def test_the_encoders_are_saved_bit_by_bit_beside_what_was_trained(checkpoint, tmp_path):
    model_type, folder, before = checkpoint
    (folder / "preprocessor_config.json").write_text("{}")
    (tmp_path / "tokenizer").mkdir()
    model = load_model(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    saved = tmp_path / "saved"
    write_model(ExportedModel(model), saved, tmp_path / "tokenizer", "", "1GB", str(folder))
    assert (saved / "preprocessor_config.json").is_file()
    shapes = {name: tensor.shape for path in saved.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert shapes == {name: tensor.shape for name, tensor in before.items()}
    kind = getattr(transformers, CLASSES[model_type])
    again, report = kind.from_pretrained(saved, dtype="auto", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    whole = kind.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert again.state_dict().keys() == whole.keys()
    trained = model.state_dict()
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor.float(), trained.get(name, whole[name]), atol=0, rtol=0, msg=name)
    assert any(is_of_encoder(name) for name in before)


def test_a_model_loaded_whole_by_its_owner_is_trained_and_sent_without_its_encoders(checkpoint):
    model_type, folder, weights = checkpoint
    whole = getattr(transformers, CLASSES[model_type]).from_pretrained(folder, dtype=torch.float32)
    TransformersWrapper(whole, generate=False)
    assert get_model_metadata(whole).keys() == {name for name in weights if not is_of_encoder(name)}


def test_log_probs_are_those_of_the_whole_class(checkpoint):
    model_type, folder, _ = checkpoint
    whole = getattr(transformers, CLASSES[model_type]).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(20, 45)
    with torch.no_grad():
        expected = whole(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        model = load_model(folder).eval()
        actual = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def test_adapters_are_of_the_language_model(checkpoint):
    _, folder, weights = checkpoint
    model = load_model(folder, lora=LoRAConfig(rank=2))
    TransformersWrapper(model, generate=False)
    assert get_model_metadata(model).keys() == {name for name in weights if not is_of_encoder(name)}


def test_layers_are_sharded(checkpoint):
    _, folder, _ = checkpoint
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = load_model(folder)
        expected = copy.deepcopy(dict(ModelWeights(model)))
        for context_ranks in (-3, 0, 2):
            with pytest.raises(ValueError, match=f"context_ranks={context_ranks} does not divide the 1 ranks"):
                shard_model(model, context_ranks=context_ranks)
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        shard_model(model)
        sent = dict(ModelWeights(model))
        assert sent.keys() == expected.keys()
        assert all(torch.equal(sent[name], tensor) for name, tensor in expected.items())
    finally:
        torch.distributed.destroy_process_group()
