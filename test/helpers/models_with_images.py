"""Random checkpoints with images, small enough for vLLM's CPU kernels, in the official form of their classes."""

from __future__ import annotations

import torch
from causal_types import tiny_config

TEXT = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "pad_token_id": 2, "eos_token_id": 2, "bos_token_id": 1,
}  # fmt: skip
IDS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]}
KINDS = {
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "rope_parameters": ROPE,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
        {"out_hidden_size": 128},
    ),
    "gemma4": ("Gemma4ForConditionalGeneration", {
            "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "sliding_window": 16,
            "num_experts": None, "global_head_dim": 64, "rope_parameters": None, "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 32,
        }, {}),
}  # fmt: skip


def make_checkpoint(model_type, folder, **sizes):
    """Write a random bfloat16 checkpoint, sure of its tokens, and return its class; `sizes` are of its text."""
    import transformers

    name, text, vision = KINDS[model_type]
    text = {**TEXT, **text, **sizes}
    if "hidden_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = text["vocab_size"]
    whole = tiny_config(model_type)
    config = tiny_config(
        model_type,
        text_config=tiny_config(whole.text_config.model_type, **text),
        vision_config=tiny_config(whole.vision_config.model_type, **vision),
        tie_word_embeddings=True,
        **IDS,
    )
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    # Larger ones, which are also the head, would make every token be repeated for sure.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.03)
    model.to(torch.bfloat16).save_pretrained(folder)
    return kind
