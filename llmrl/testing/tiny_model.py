"""A tiny random model, which vLLM loads in seconds."""

from __future__ import annotations

import os

from llmrl.testing.embedded_model import ensure_embedded_model, quiet_libraries


def make_tiny_model(path: str | os.PathLike[str]) -> str:
    """Save a one-layer Llama with fixed random weights and the embedded model's tokenizer; return its folder."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ensure_embedded_model())
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]), quiet_libraries():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(path)
    return os.fspath(path)
