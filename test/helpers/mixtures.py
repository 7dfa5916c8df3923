"""A tiny random mixture of experts, its routers written out by hand, and training rows of it."""

import copy

import torch
from tensordict import TensorDict

VOCAB, NUM_LAYERS, NUM_EXPERTS, TOP_K = 23, 3, 5, 2


def make_model(**changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB}
    sizes |= {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K}
    config = Qwen3MoeConfig(
        num_hidden_layers=NUM_LAYERS,
        moe_intermediate_size=8,
        norm_topk_prob=True,
        attn_implementation="eager",
        max_position_embeddings=128,
        **{**sizes, **changes},
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


def drawn_experts(num_tokens, generator):
    """Any experts, different ones at a token."""
    scores = torch.rand(num_tokens, NUM_LAYERS, NUM_EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices.short()


def by_hand(model, ids, experts):
    """Log-probs `[num_tokens]` of one row by itself, its routers written out; own choices where experts are -1."""
    forced = copy.deepcopy(model)
    for index, layer in enumerate(forced.model.layers):
        gate = layer.mlp.gate

        def route(hidden, gate=gate, index=index):
            probabilities = (hidden.reshape(-1, hidden.shape[-1]) @ gate.weight.T).softmax(-1)
            own = probabilities.sort(-1, descending=True).indices[:, :TOP_K]
            told = torch.full_like(own, -1) if experts is None else experts[:, index].long()
            chosen = torch.where(told < 0, own, told)
            weights = torch.stack([row[places] for row, places in zip(probabilities, chosen, strict=True)])
            return None, weights / weights.sum(-1, keepdim=True), chosen

        gate.forward = route
        gate._forward_hooks.clear()
    log_probs = forced(input_ids=ids[None]).logits[0].log_softmax(-1)
    values = torch.cat([torch.zeros(1), log_probs[:-1].gather(1, ids[1:, None])[:, 0]])
    return values, forced


def make_row(ids, mask, experts):
    row = TensorDict(
        {
            "tokens": {"full": ids},
            "masks": {"all_assistant_mask": mask},
            "log_probs": {"full": torch.full(ids.shape, -1.0)},
            "policy_versions": {"full": torch.zeros_like(ids)},
            "advantage": torch.randn(1, 1),
        }
    )
    if experts is not None:
        row["routed_experts"] = experts
    return row
