"""Inputs of the stages: models with random weights and training rows, in full and in tiny size."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

Rows = tuple[int, int, int]
"""Number of rows in a group, of tokens that the rows share, and of each row's own tokens."""

ON_GPUS_ALONE = (
    "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "kimi_linear", "nemotron_h", "olmo_hybrid", "qwen4_exp",
)  # fmt: skip
"""Types of models that lack kernels in vLLM's CPU build."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of all stages; the defaults are for a GPU with at least 80 GB."""

    lengths: tuple[int, ...] = (1024, 4096, 16_384, 32_768)
    """Numbers of tokens in the stage `attention`."""
    dense_length: int = 16_384
    """Maximum number of tokens with a dense attention mask."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Number of query heads, number of key heads and width of a head, in the stage `attention`."""
    head: tuple[int, int, int] = (16_384, 4096, 151_936)
    """Number of positions, width and size of the vocabulary in the stage `head`."""
    chunk_sizes: tuple[int, ...] = (64, 1024, 4096)
    models: tuple[str, ...] = ("0.5B", "1.5B")
    """Models to train."""
    sharded_model: str = "3B"
    engine_model: str = "1.5B"
    """Model that vLLM serves."""
    served_types: tuple[tuple[str, str], ...] = (
        *((name, "bfloat16") for name in ON_GPUS_ALONE),
        *((name, "float16") for name in ("llama", "qwen3", "gemma3")),
        *((name, "bfloat16") for name in ("qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid", "gpt_oss", "gemma4")),
    )
    """Types of tiny random models that vLLM serves, and their dtypes."""
    batches: tuple[Rows, ...] = ((16, 0, 1024), (4, 0, 16_384), (16, 4000, 200))
    token_budget: int = 16_384
    num_steps: int = 3
    """Number of timed steps, after one that compiles."""
    num_learning_steps: int = 50


TINY = Sizes(
    lengths=(256, 384),
    dense_length=256,
    heads=(4, 2, 16),
    head=(96, 16, 300),
    chunk_sizes=(16, 64),
    models=("tiny",),
    sharded_model="tiny",
    engine_model="served",
    served_types=(("llama", "float32"),),
    batches=((4, 0, 40), (4, 60, 10)),
    token_budget=256,
    num_steps=1,
    num_learning_steps=12,
)

MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 64},
    "served": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 512},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "vocab_size": 151_936},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 151_936},
    "3B": {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16,
           "num_key_value_heads": 2, "vocab_size": 151_936},
    "8B": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 151_936},
}  # fmt: skip
"""Shapes of models, by size; most are those of Qwen 2.5 and Qwen 3."""


def make_model(name: str, device: str, *, gradient_checkpointing: bool = False, dtype: torch.dtype = torch.float32):
    """Return a Qwen 2 with random weights, created on the device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**MODELS[name], max_position_embeddings=40_960, tie_word_embeddings=name != "8B")
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM._from_config(config, dtype=dtype, attn_implementation="sdpa")
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model.eval()


def num_weights(model: torch.nn.Module) -> int:
    """Return the number of weights that multiply each token: all except the embedding, which is looked up."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return sum(p.numel() for p in model.parameters()) - (0 if head is embedding else embedding.numel())


def flops_of(name: str, model: torch.nn.Module, batch: Rows) -> float:
    """Return the FLOPs of a forward and backward pass: 6 per weight and token, and 12 per attended pair and channel."""
    num_rows, num_shared, num_own = batch
    num_tokens = num_shared + num_rows * num_own
    pairs = num_shared**2 / 2 + num_rows * (num_shared * num_own + num_own**2 / 2)
    config = MODELS[name]
    return 6 * num_weights(model) * num_tokens + 12 * pairs * config["hidden_size"] * config["num_hidden_layers"]


def make_batch(rows: Rows, vocab_size: int) -> TensorDictBase:
    """Return training rows with advantages; each row's own tokens are trained."""
    num_rows, num_shared, num_own = rows
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, vocab_size, (num_shared,), generator=generator)
    made = []
    for index in range(num_rows):
        own = torch.randint(0, vocab_size, (num_own,), generator=generator)
        tokens = torch.cat([prompt, own])
        mask = torch.arange(len(tokens)) >= max(1, num_shared)
        made.append(training_row(tokens, mask, -3.0 * mask.float(), 1.0 - 2 * (index % 2), f"rollout-{index}"))
    return lazy_stack(made)


def training_row(
    tokens: torch.Tensor, mask: torch.Tensor, log_probs: torch.Tensor, advantage: float, rollout_id: str
) -> TensorDict:
    """Return a training row with the entries that a collector writes."""
    from tensordict import NonTensorData

    return TensorDict(
        {
            "tokens": {"full": tokens},
            "masks": {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
            "log_probs": {"full": log_probs},
            "policy_versions": {"full": torch.where(mask, 0, -1)},
            "advantage": torch.full((1, 1), advantage),
            "rollout": {
                "rollout_id": NonTensorData(rollout_id),
                "group_id": NonTensorData("group"),
                "is_scored": torch.tensor(True),
            },
            "next": {"reward": torch.zeros(1, 1)},
        }
    )
