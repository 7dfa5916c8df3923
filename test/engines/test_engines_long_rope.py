"""LongRoPE has two sets of frequencies: engine and trainer use the same, which the engine's length decides."""

from __future__ import annotations

import pytest
import torch
from transformers import Phi3Config, Phi3ForCausalLM

from llmrl import VLLMWeightSyncScheme, get_model_metadata
from llmrl.engines import AsyncVLLM, SamplingConfig
from llmrl.trainer import TransformersWrapper

ORIGINAL = 32
PROMPTS = [[5, 6, 7, 8], [900, 901, 902]]


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """A random Phi-3 in the form of those for long rows, with its folder."""
    folder = tmp_path_factory.mktemp("phi")
    tokenizer.save_pretrained(folder)
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "rope_theta": 1e4}
    config = Phi3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=ORIGINAL,
        rope_parameters=rope, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    one = Phi3ForCausalLM(config)
    one.save_pretrained(folder)
    return one, folder


@pytest.mark.parametrize("max_model_len", [ORIGINAL, 2 * ORIGINAL])
def test_the_trainer_has_the_log_probs_of_engines_of_both_lengths(model, real_vllm, max_model_len):
    one, folder = model
    options = {"dtype": "float32", "kv_cache_memory": 1 << 26, "cpu_threads": 1}
    with AsyncVLLM.from_pretrained(folder, max_model_len=max_model_len, **options) as engine:
        sender = VLLMWeightSyncScheme().create_sender()
        sender.register_model(one)
        sender.init_all_workers_group(get_model_metadata(one), engine)
        with torch.no_grad():
            one.lm_head.weight.mul_(1.1)
        sender.update_weights()
        longest = max_model_len - 5  # shorter than the original length, and longer where the engine allows it
        answers = [
            engine.generate_batch(PROMPTS, SamplingConfig(max_new_tokens=num, ignore_eos=True)) for num in (20, longest)
        ]
    policy = TransformersWrapper(one, generate=False)
    for completions in answers:
        ids = [[*prompt, *answer.token_ids] for prompt, answer in zip(PROMPTS, completions, strict=True)]
        masks = [torch.arange(len(row)) >= len(prompt) for prompt, row in zip(PROMPTS, ids, strict=True)]
        found = [torch.zeros(len(row)) for row in ids]
        for packed in policy.pack([torch.tensor(row) for row in ids], masks):
            log_probs = policy.packed_log_probs(packed)[0].detach()
            for row, index, value in zip(packed.row_index, packed.token_index, log_probs, strict=True):
                found[row][index] = value
        for row, mask, answer in zip(found, masks, completions, strict=True):
            torch.testing.assert_close(row[mask], torch.tensor(answer.log_probs), atol=2e-4, rtol=0)
