"""Small ragged batches and policies that the tests of losses share."""

from __future__ import annotations

import copy
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

VOCAB_SIZE = 41


class Table(TensorDictModuleBase):
    """A plain policy with log-probs that are a parameter: `[num_row_tokens]`."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self.in_keys = [("tokens", "full")]
        self.out_keys = [("log_probs", "full"), "entropy"]
        self.log_probs = torch.nn.Parameter(log_probs)
        self.entropies = torch.nn.Parameter(log_probs.detach().square())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        start = 0
        for row in tensordict.unbind(0):
            end = start + row["tokens", "full"].shape[0]
            row.set(("log_probs", "full"), self.log_probs[start:end])
            row.set("entropy", self.entropies[start:end])
            start = end
        return tensordict


def ragged_batch(seed: int = 0, *, num_rows: int = 6) -> TensorDictBase:
    """Rows of different lengths, two per group; rows 1 and 2 are of one rollout."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(num_rows):
        length = int(torch.randint(3, 12, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0], mask[1] = False, True
        sampled = -3 * torch.rand(length, generator=generator) * mask
        rollout = 1 if index == 2 else index
        row = TensorDict(
            {
                "tokens": {"full": torch.randint(0, VOCAB_SIZE, (length,), generator=generator)},
                "masks": {"all_assistant_mask": mask, "all_attention_mask": torch.ones_like(mask)},
                "log_probs": {"full": sampled},
                "policy_versions": {"full": torch.where(mask, torch.randint(3, 6, (length,), generator=generator), -1)},
                "advantage": torch.randn(1, 1, generator=generator),
                "next": {"ref_log_probs": {"full": -3 * torch.rand(length, generator=generator)}},
                "rollout": {
                    "rollout_id": NonTensorData(str(rollout)),
                    "group_id": NonTensorData(str(rollout // 2)),
                },
            }
        )
        rows.append(row)
    return lazy_stack(rows, 0)


def with_prompts(batch: TensorDictBase, prompts: list[torch.Tensor]) -> TensorDictBase:
    """The rows after prompts that are not trained."""
    rows = []
    for row, prompt in zip(batch.unbind(0), prompts, strict=True):
        longer = row.copy()
        longer["tokens", "full"] = torch.cat([prompt, row["tokens", "full"]])
        for key, fill in (
            (("masks", "all_assistant_mask"), False), (("masks", "all_attention_mask"), True),
            (("log_probs", "full"), 0.0), (("policy_versions", "full"), -1), (("next", "ref_log_probs", "full"), 0.0),
        ):  # fmt: skip
            column = row[key]
            longer[key] = torch.cat([torch.full_like(prompt, fill, dtype=column.dtype), column])
        rows.append(longer)
    return lazy_stack(rows, 0)


def flat(batch: TensorDictBase, *key: str) -> torch.Tensor:
    """An entry of one number per token, row after row."""
    return torch.cat([row[key] for row in batch.unbind(0)])


def near_policy(batch: TensorDictBase, spread: float = 0.3) -> Table:
    """A policy with log-probs near the sampler's."""
    sampled = flat(batch, "log_probs", "full")
    return Table(sampled + spread * torch.randn(sampled.shape, generator=torch.Generator().manual_seed(9)))


def tiny_model(*, is_tied: bool = False, vocab_size: int = VOCAB_SIZE) -> Any:
    """A random llama, always the same."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
        tie_word_embeddings=is_tied,
    )
    return LlamaForCausalLM(config)


def plain_log_probs(model: Any, row: TensorDictBase) -> torch.Tensor:
    """Of a row's tokens, `[num_tokens]` with 0 at the first, by a model in `eager` attention."""
    ids = row["tokens", "full"]
    log_probs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return torch.cat([log_probs.new_zeros(1), log_probs])


def plain_gradients(model: Any, batch: TensorDictBase) -> dict[str, torch.Tensor]:
    """Of the importance-weighted token mean without clipping, in float64, one row at a time, by `eager` attention."""
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    losses = []
    for row in batch.unbind(0):
        ratios = (plain_log_probs(model, row) - row["log_probs", "full"].double()).exp()
        losses.append(-(ratios * row["advantage"].item())[row["masks", "all_assistant_mask"]])
    torch.cat(losses).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def with_lora(model: Any, targets: list[str], **arguments: Any) -> Any:
    """A model with random, not zero, LoRA adapters."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=targets, lora_dropout=0.1, **arguments))
    return with_drawn_adapters(adapted, size=0.3, seed=3)


def with_drawn_adapters(model: Any, *, size: float, seed: int) -> Any:
    """The model, after its LoRA adapters were set to normal numbers of that size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn(parameter.shape, generator=generator))
    return model
