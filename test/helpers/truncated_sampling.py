"""A tiny random model, and what is asked of it with truncated sampling."""

import asyncio

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 37
CUTS = [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9}]


def make_model(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.6,
    )
    return LlamaForCausalLM(config).eval()


def sampled(engine, prompts, sampling):
    async def all_of_them():
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))

    return asyncio.run(all_of_them())
