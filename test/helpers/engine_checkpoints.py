"""Tiny random checkpoints in the official form of their types, in sizes that vLLM's kernels take."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import torch
from causal_types import SIZES as TINY_SIZES
from causal_types import SPECIAL, tiny_config
from safetensors.torch import load_file, save_file

# vLLM's kernels and blocks want multiples of 32.
SIZES = {8: 32, 16: 64, 32: 128, 48: 128, 61: 64}
# What sizes of tiny configurations do not fit, and what official configurations have in another way.
_DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # all that vLLM's kernels on a CPU have
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
_HALF_ROPE = {
    "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}
}
_FULL = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
_CHANGES: dict[str, dict[str, Any]] = {
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [64, 64]},
    "falcon": {"ffn_hidden_size": 512},  # vLLM has four times the hidden size, as checkpoints do
    "falcon_h1": {"mamba_d_ssm": 256},
    # Without caps, as official ones: transformers leaves them out of its class with images. Not too sure without them.
    "gemma3_text": {"final_logit_softcapping": None, "attn_logit_softcapping": None, "initializer_range": 0.04},
    "gemma3n_text": {"hidden_size_per_layer_input": 32},
    "gemma4_text": {"num_experts": None, "enable_moe_block": False},
    "glm4v_text": _HALF_ROPE,
    "glm4v_moe_text": _HALF_ROPE,
    "glm_ocr_text": _HALF_ROPE,
    "granite4_vision": {
        "text_config": lambda: tiny_config("granite"),
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 1, 0, 1],
        "downsample_rate": "1/2",
    },
    "lfm2_moe": {"num_dense_layers": 1},
    # A block of vLLM's cache, and one expert a token as in checkpoints.
    "llama4_text": {"attention_chunk_size": 32, "num_experts_per_tok": 1},
    "mamba2": {"head_dim": 64},
    "mistral3": {"text_config": lambda: tiny_config("ministral3")},
    "qwen2": _FULL,
    "paddleocr_vl_text": _MROPE,
    "qwen2_5_vl_text": _FULL | _MROPE,
    "qwen2_moe": _FULL,
    "qwen2_vl_text": _FULL | _MROPE,
    "qwen3": _FULL,
    # Not square, since transformers finds by its shape whether an expert's weight is transposed.
    "qwen3_vl_moe_text": {"moe_intermediate_size": 32},
    "qwen3_5_moe_text": _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp_text": {"indexer_head_dim": 32},
    "zamba2": {"attention_head_dim": 64},
}
# Classes that official checkpoints name, and vLLM, where transformers has another name.
OFFICIAL_CLASSES = {"Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration"}
# Entries of official configurations that vLLM reads and transformers' classes do not name.
_OFFICIAL: dict[str, dict[str, Any]] = {
    "afmoe": {"n_group": 1, "route_norm": True, "route_scale": 1.0, "score_func": "sigmoid", "topk_group": 1},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "glm4_moe": {"head_dim": 32},
    "glm4v_moe_text": {"head_dim": 32, "use_qk_norm": False},
    "glm4v_text": {"attention_bias": True},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "hy_v3": {"first_k_dense_replace": 1, "expert_hidden_dim": 64, "qk_norm": True, "route_norm": True},
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "partial_rotary_factor": 0.334,
        "rope_theta": 5e6,
        "swa_rope_theta": 1e4,
        "add_swa_attention_sink_bias": True,
        "sliding_window_size": 18,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
    },
}


def write_checkpoint(model_type, class_name, folder):
    """Write a random checkpoint, and return the class that official ones name."""
    import transformers

    kind = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = kind(enlarged(model_type, kind))
    with torch.no_grad():
        for one in model.state_dict().values():  # biases, norms, sinks, and corrections of routers
            if one.ndim < 2 and one.is_floating_point():
                one += 0.1 * torch.randn(one.shape)
    model.save_pretrained(folder)
    if model_type == "qwen3_vl_moe":  # transformers reads experts in either form, and does not write the official one
        (file,) = folder.glob("*.safetensors")
        stored = load_file(file)
        for name in stored:
            if ".experts." in name:
                stored[name] = stored[name].transpose(1, 2).contiguous()
        save_file(stored, file, metadata={"format": "pt"})
    official = OFFICIAL_CLASSES.get(class_name, class_name)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [official]}))
    return official


def enlarged(model_type, kind):
    """The tiny configuration of a type, in sizes that vLLM's layers take."""
    sizes = {name: SIZES.get(size, size) if type(size) is int else size for name, size in TINY_SIZES.items()}
    sizes |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}  # all that vLLM's latent attention on a CPU has
    sizes["use_sliding_window"] = False  # off in checkpoints, and vLLM has it for all layers or none
    special = {name: SPECIAL.get(name, {}) | changes for name, changes in _CHANGES.items()}
    with mock.patch.dict(TINY_SIZES, sizes), mock.patch.dict(SPECIAL, special):
        config = tiny_config(model_type)
    text = config.get_text_config()
    for name, value in _OFFICIAL.get(text.model_type, {}).items():
        if not hasattr(text, name):
            setattr(text, name, value)
    if not isinstance(config, kind.config_class):
        config = next(part for part in vars(config).values() if isinstance(part, kind.config_class))
    return config
