"""Tiny random models that say some tokens far more often than others, so that answers end, or have rewards."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmrl.testing import make_tiny_model
from llmrl.testing.embedded_model import model_folder


def save_model_that_says(path, shares):
    """Save a model that says each token of `shares`, by id, with about its probability, whatever was said before."""
    make_tiny_model(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    num_others, rest = model.lm_head.weight.shape[0], 1 - sum(shares.values())
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight[:, 0] = 0.0
        hidden = model.model(torch.arange(100)[:, None]).last_hidden_state[:, -1, 0]
        for token_id, share in shares.items():
            model.lm_head.weight[token_id, 0] = math.log(num_others * share / rest) / hidden.mean()
    model.save_pretrained(path)


def save_as_embedded(home):
    """Save a model that answers with short numbers where the embedded model lies in a home of llmrl; its folder.

    One group of four in thirteen has a signal for sums of two digits: 128 in a row without one are one case in 20,000.
    """
    folder = model_folder(home)
    folder.mkdir(parents=True)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder))
    digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
    space = tokenizer.convert_tokens_to_ids("Ġ")
    save_model_that_says(folder, {tokenizer.eos_token_id: 0.2, space: 0.3, **dict.fromkeys(digits, 0.04)})
    files = {path.name: {"size": path.stat().st_size} for path in folder.iterdir()}
    (folder / "llmrl-manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    return Path(folder)


def letters_of(completion):
    """Something that a random model's answers differ in."""
    return sum(map(ord, completion)) % 97 / 97
