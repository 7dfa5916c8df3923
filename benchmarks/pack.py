"""Number of tokens that packed rows compute relative to distinct tokens, and time of packing by number of rows.

Groups have sixteen samples of one prompt, in four lengths of prompt and completion. Tokens of different rows are the
same token if they and all tokens before them are equal; each distinct token must be computed once, except the last of a
row. For hybrid models, the tokens that linear layers compute are counted, for one of the lengths. The time is that of
`pack_rows` on rows of 130 to 230 tokens, ungrouped and in groups of sixteen.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tensordict import TensorDict, lazy_stack

from llmrl.trainer import TransformersWrapper
from llmrl.trainer.packing.packed_rows import pack_rows

NUM_SAMPLES = 16
SHAPES = ((100, 50), (200, 300), (1500, 500), (4000, 200))
TOKEN_BUDGET = 16384
GOAL = 1.1
NUM_REPEATS = 5
HYBRID_SHAPE = (1500, 500)
VOCAB_SIZE = 4096
_SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], **_MAMBA},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "state_size": 8, "n_groups": 1},
}


def group(num_prompt: int, num_completion: int, num_samples: int = NUM_SAMPLES) -> tuple[list[Any], list[Any]]:
    """Return rows of one prompt with random completions, and masks of the completions."""
    prompt = torch.randint(0, 50_000, (num_prompt,))
    rows = [torch.cat([prompt, torch.randint(0, 50_000, (num_completion,))]) for _ in range(num_samples)]
    return rows, [torch.arange(len(row)) >= num_prompt for row in rows]


def hybrid_ratio(model_type: str) -> float:
    """Return the tokens that a linear layer of a tiny model computes for a group, relative to distinct tokens."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **_SIZES | HYBRIDS[model_type]))
    # Use the bin length of a GPU: for such small models, a CPU would recompute prompts to save attention.
    policy = TransformersWrapper(model, generate=False, token_budget=TOKEN_BUDGET, bin_length=TOKEN_BUDGET)
    num_prompt, num_completion = HYBRID_SHAPE
    rows, masks = group(num_prompt, num_completion)
    batch = lazy_stack(
        [
            TensorDict({"tokens": {"full": row % VOCAB_SIZE}, "masks": {"all_assistant_mask": mask}})
            for row, mask in zip(rows, masks, strict=True)
        ]
    )
    counts: Counter[str] = Counter()

    def count(name: str, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        counts[name] += output.shape[:-1].numel()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(partial(count, name))
    with torch.no_grad():
        policy(batch)
    return max(counts.values()) / (num_prompt + NUM_SAMPLES * (num_completion - 1))


def _seconds(rows: list[Any], masks: list[Any]) -> float:
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        pack_rows(rows, masks)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def run() -> dict[str, Any]:
    """Pack each shape, print the table, and return the result."""
    torch.manual_seed(0)
    medians: dict[str, float] = {}
    for num_prompt, num_completion in SHAPES:
        num_distinct = num_prompt + NUM_SAMPLES * (num_completion - 1)
        packed = pack_rows(*group(num_prompt, num_completion), token_budget=TOKEN_BUDGET)
        num_computed = sum(micro_batch.num_packed_tokens for micro_batch in packed)
        medians[f"computed over distinct, {num_prompt} + {num_completion}"] = num_computed / num_distinct
    for model_type in HYBRIDS:
        medians[f"computed over distinct, {model_type}"] = hybrid_ratio(model_type)
    ratio = max(medians.values())
    for num_groups in (8, 64, 256, 512):
        parts = [group(int(n), int(c)) for n, c in torch.randint(65, 116, (num_groups, 2))]
        rows, masks = ([row for part in parts for row in part[which]] for which in (0, 1))
        medians[f"{len(rows)} rows in groups of {NUM_SAMPLES}, s"] = _seconds(rows, masks)
    for num_rows in (128, 1024, 4096, 8192):
        parts = [group(20, int(c), 1) for c in torch.randint(110, 211, (num_rows,))]
        rows, masks = ([row for part in parts for row in part[which]] for which in (0, 1))
        medians[f"{num_rows} rows by themselves, s"] = _seconds(rows, masks)
    table = Table("measured", "median", title="packing")
    for name, value in medians.items():
        table.add_row(name, f"{value:.4g}")
    Console().print(table)
    return {
        "name": "pack",
        "ratio": ratio,
        "ratio_of": "computed tokens to distinct tokens, the worst of four shapes and five hybrid models",
        "goal": GOAL,
        "met": ratio <= GOAL,
        "medians": medians,
    }
