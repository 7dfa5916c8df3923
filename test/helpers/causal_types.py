"""Tiny random configurations of every causal language model of the installed transformers.

Every length that decides what is seen (windows, chunks, top-k of an index) is shorter than the rows of a test and
longer than the rows of the product's own probe, weights are large, so that caps, biases and sinks matter, and every
type of layer that a family has is there once.

`python test/helpers/causal_types.py` compares each of them and writes `docs/models.md`.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
VOCAB_SIZE = 61
WINDOW = 18
# What each name of a size is set to, wherever a configuration has it.
_GROUPS: list[tuple[Any, str]] = [
    (VOCAB_SIZE, "vocab_size decoder_vocab_size"),
    (
        32,
        "hidden_size d_model n_embd emb_dim dim embedding_size embedding_dim input_embedding_size "
        "word_embed_proj_dim output_embedding_size lru_width hidden_size_global rel_extent",
    ),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers encoder_layers "
        "num_encoder_layers num_experts_per_tok moe_topk moe_k num_key_value_heads swa_num_key_value_heads "
        "linear_num_key_heads linear_num_heads kv_n_heads hc_mult hc_count o_groups depth pad_token_id "
        "eos_token_id sep_token_id hidden_size_per_layer_input heads_per_ngram",
    ),
    (
        1,
        "n_group topk_group bos_token_id moe_layer_start_index first_k_dense_replace zero_expert_num "
        "num_mem_blocks n_shared_experts num_shared_experts moe_num_shared_experts decoder_sparse_step "
        "moe_layer_freq n_groups mamba_n_groups mamba_ngroups",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
        "mamba_num_heads num_decoder_attention_heads num_encoder_attention_heads attention_heads num_experts "
        "num_local_experts swa_num_attention_heads n_routed_experts moe_num_experts mamba_n_heads "
        "linear_num_value_heads rotary_dim laurel_rank d_rel patch_size temporal_patch_size",
    ),
    (
        8,
        "head_dim d_kv d_head qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim index_head_dim "
        "linear_key_head_dim global_head_dim linear_value_head_dim linear_head_dim kv_channels "
        "attention_head_size mamba_state_size mamba_d_state ssm_state_size state_size o_lora_rank "
        "router_hidden_size time_step_rank query_pre_attn_scalar adapter_rank image_size hc_lowrank "
        "ple_embed_dim",
    ),
    (
        16,
        "dim_model_base index_n_heads qk_head_dim moe_intermediate_size kv_lora_rank q_lora_rank "
        "shared_expert_intermediate_size intermediate_size_mlp expert_dim moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size mamba_d_head mamba_head_dim ngram_vocab_size_base pronunciation_embed_dim "
        "shape_embed_dim dense_intermediate_size shared_intermediate_size mamba_headdim",
    ),
    (
        48,
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_inner dff dim_ff "
        "feed_forward_size ffn_hidden_size",
    ),
    (128, "max_position_embeddings n_positions max_target_positions max_seq_len context_length mamba_d_ssm"),
    (64, "pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab"),
    (
        WINDOW,
        "sliding_window window_size attention_window_size local_attention sliding_window_size "
        "attention_chunk_size index_topk indexer_budget floor_scale log_scaling_n_floor",
    ),
    (0.3, "initializer_range init_std embed_init_std"),
    (0.0, "dropout attention_dropout hidden_dropout_prob attention_probs_dropout_prob"),
    (
        3.0,
        "attn_logit_softcapping final_logit_softcapping output_logit_soft_cap lm_head_multiplier "
        "logits_scaling logit_scale logits_mup_width_multiplier",
    ),
    (False, "use_cache"),
    (True, "use_sliding_window alibi is_decoder"),
]
SIZES: dict[str, Any] = {name: value for value, names in _GROUPS for name in names.split()}
# What a family needs besides.
SPECIAL: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for name in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {
        "text_config": lambda: tiny_config(
            "gemma4_text", hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2
        )
    },
    "gemma4_unified_assistant": {"text_config": lambda: tiny_config("gemma4_unified_text", num_kv_shared_layers=2)},
    "got_ocr2": {
        "text_config": lambda: tiny_config("qwen2"),
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "mlp_dim": 48,
            "output_channels": 16,
            "image_size": 32,
            "patch_size": 8,
            "window_size": 2,
            "global_attn_indexes": [0],
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0]},
    "mamba2": {"expand": 2, "num_heads": 4, "head_dim": 16},
    "minimax_m3_vl_text": {
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
    },
    "musicgen": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}},
    "musicgen_melody": {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_compress_ratio": 2,
        "ple_layer_ids": [1],
    },
    "recurrent_gemma": {"logits_soft_cap": 3.0, "initializer_range": 0.1, "num_hidden_layers": 3},
    "hrm_text": {"initializer_range": 0.1},
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
    },
    "rwkv": {"rescale_every": 0},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The configuration of a type, by its name in transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type], changes)


def _tiny(kind: Any, changes: dict[str, Any]) -> Any:
    changes = SPECIAL.get(kind.model_type, {}) | changes
    fields = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in SIZES.items() if name in fields}
    if {"kv_lora_rank", "num_key_value_heads"} <= fields:
        values["num_key_value_heads"] = 4  # latent attention has a key head for each head
    parts = {name: sub for name, sub in kind.sub_configs.items() if name in fields and name not in changes}
    if not all(map(dataclasses.is_dataclass, parts.values())):  # parts of any type: that which it has by default
        usual_parts = kind()
        parts = {name: type(getattr(usual_parts, name)) for name in parts}
    values |= {name: _tiny(sub, {}) for name, sub in parts.items() if dataclasses.is_dataclass(sub)}
    if "layer_types" in fields and "layer_types" not in changes:
        usual = list(dict.fromkeys(getattr(kind(), "layer_types", None) or []))
        if usual == ["full_attention"] and "sliding_window" in fields:
            usual = ["sliding_attention", "full_attention"]
        if usual:
            values |= {"layer_types": usual * (1 if len(usual) > 1 else 2)}
            values |= {"num_hidden_layers": len(values["layer_types"])}
    values |= {name: value() if callable(value) else value for name, value in changes.items()}
    return kind(**values)


def causal_types() -> dict[str, str]:
    """The class of each type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_model(model_type: str, *, config: Any = None, **arguments: Any) -> Any:
    """A random model in eval mode; its biases, norms and sinks are random too.

    Args:
        model_type: as transformers names it.
        config: default, `tiny_config(model_type)`.
        arguments: for example `attn_implementation`.

    Raises:
        ImportError: when the model needs a package that is not installed.
    """
    import transformers

    kind = getattr(transformers, causal_types()[model_type])
    config = tiny_config(model_type) if config is None else copy.deepcopy(config)
    if not isinstance(config, kind.config_class):  # that of the decoder, within a larger one
        config = next(part for part in vars(config).values() if isinstance(part, kind.config_class))
    torch.manual_seed(0)
    model = kind._from_config(config, **arguments).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter += 0.1 * torch.randn(parameter.shape)
    return model


def rows() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Ids of rows that are longer than `WINDOW` and share prefixes of several lengths, and a weight for each token."""
    generator = torch.Generator().manual_seed(3)

    def ids(num: int) -> torch.Tensor:
        return torch.randint(5, VOCAB_SIZE, (num,), generator=generator)

    prompt, completion = ids(21), ids(7)
    token_ids = [
        torch.cat([prompt, completion]),
        torch.cat([prompt, completion[:3], ids(9)]),
        torch.cat([prompt, ids(2)]),
        torch.cat([prompt[:6], ids(16)]),
        ids(25),
    ]
    weights = [torch.randn(len(row), generator=generator) for row in token_ids]
    for weight in weights:
        weight[:4] = 0  # not trained
    return token_ids, weights


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How a type is trained, and how far from `eager`, one row at a time."""

    outcome: str
    """`packed`, `one row a bin` or `refused`; `not installed` where a package is missing."""
    reason: str = ""
    """Why rows are not packed, or the model is refused."""
    log_prob_error: float = 0.0
    """Largest difference, in nats."""
    gradient_error: float = 0.0
    """Norm of the difference over the norm of the gradient."""

    @property
    def loss_mask(self) -> bool:
        """Not refused."""
        return self.outcome in ("packed", "one row a bin")

    @property
    def is_exact(self) -> bool:
        """As exact as float32 is, or refused.

        Layers with a state add up rounding over a row, more or less by the processor's vectors: up to 2.3e-5 was seen.
        A mask or a position that is wrong moves log-probs by hundredths.
        """
        return not self.loss_mask or (self.log_prob_error < 1e-4 and self.gradient_error < 1e-4)


def compare(
    model_type: str,
    *,
    config: Any = None,
    is_checkpointing: bool = False,
    rows_and_weights: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None,
    **arguments: Any,
) -> Comparison:
    """Train a random model on `rows` by `TransformersWrapper`, and a copy of its weights by a plain loop in `eager`.

    Args:
        model_type: as transformers names it.
        config: default, `tiny_config(model_type)`.
        is_checkpointing: whether the wrapped model has gradient checkpointing.
        rows_and_weights: default, `rows()`.
        arguments: for example `attn_implementation`.
    """
    from llmrl.trainer import TransformersWrapper

    token_ids, weights = rows() if rows_and_weights is None else rows_and_weights
    model = tiny_model(model_type, config=config, **arguments)
    if is_checkpointing:
        model.gradient_checkpointing_enable()
    try:
        policy = TransformersWrapper(model, generate=False, token_budget=200, bin_length=100)
    except (TypeError, ValueError) as error:
        return Comparison("refused", str(error))
    reference = tiny_model(model_type, config=config, attn_implementation="eager")
    expected = []
    for ids in token_ids:
        log_probs = reference(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
        expected.append(log_probs[:-1].gather(-1, ids[1:, None])[:, 0])
    torch.cat([e * w[1:] for e, w in zip(expected, weights, strict=True)]).sum().backward()
    batch = lazy_stack(
        [
            TensorDict({"tokens": {"full": ids}, "masks": {"all_assistant_mask": weight != 0}})
            for ids, weight in zip(token_ids, weights, strict=True)
        ]
    )
    written = [row["log_probs", "full"] for row in policy(batch).unbind(0)]
    torch.cat([row * weight for row, weight in zip(written, weights, strict=True)]).sum().backward()
    errors = [(row[1:] - e * (w[1:] != 0)).abs().max() for row, e, w in zip(written, expected, weights, strict=True)]
    computed = policy.causal_model
    return Comparison(
        "packed" if computed.is_packed else "one row a bin",
        reason="; ".join(dict.fromkeys(computed.faults.values())),
        log_prob_error=float(torch.stack(errors).max().detach()),
        gradient_error=_gradient_error(model, reference),
    )


def _gradient_error(model: Any, reference: Any) -> float:
    """The largest of a weight, relative to its gradient, or where that is next to none to a thousandth of the whole."""
    expected = dict(reference.named_parameters())
    whole = torch.stack([other.grad.norm() for other in expected.values() if other.grad is not None]).norm()
    worst = 0.0
    for name, parameter in model.named_parameters():
        other = expected[name]
        assert (parameter.grad is None) == (other.grad is None), name
        if parameter.grad is not None:
            error = (parameter.grad - other.grad).norm() / other.grad.norm().clamp(min=1e-3 * whole)
            worst = max(worst, float(error))
    return worst


def page_outcomes() -> dict[str, str]:
    """What `docs/models.md` says of each type."""
    return dict(
        re.findall(r"^\| `([^`]+)` \| (packed|one row a bin|refused|not installed)", PAGE.read_text(), re.MULTILINE)
    )


def main() -> None:
    """Compare every type and write the tables of the page.

    Raises:
        SystemExit: when a type is trained, and not exactly.
    """
    import transformers

    results: dict[str, Comparison] = {}
    for model_type in causal_types():
        try:
            results[model_type] = compare(model_type)
        except ImportError as error:
            results[model_type] = Comparison("not installed", str(error))
        except Exception as error:
            results[model_type] = Comparison("packed", repr(error), math.inf, math.inf)
    wrong = [name for name, result in results.items() if not result.is_exact]
    counts = collections.Counter(result.outcome for result in results.values())
    lines = [
        f"transformers {transformers.__version__}, {len(results)} types: "
        + ", ".join(f"**{count} {outcome}**" for outcome, count in counts.most_common())
        + ".",
        "",
    ]
    lines += ["| type | rows are | largest difference, nats | of gradients, relative | why |", "|---|---|---|---|---|"]
    for name, result in results.items():
        errors = [f"{result.log_prob_error:.0e}", f"{result.gradient_error:.0e}"] if result.loss_mask else ["", ""]
        reason = result.reason.split(". ")[0].replace("|", "/")[:160]
        lines.append(f"| `{name}` | {result.outcome} | {' | '.join(errors)} | {reason} |")
    text = PAGE.read_text()
    PAGE.write_text(text[: text.rindex("\ntransformers") + 1] + "\n".join(lines) + "\n")
    print(lines[0])
    if wrong:
        sys.exit(f"Trained, and not exactly: {wrong}")


if __name__ == "__main__":
    main()
