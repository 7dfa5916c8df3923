"""Chat templates in the manner of known model families, over the embedded model's tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from llmrl.rendering import TemplateRenderer

FAMILIES = {
    "chatml": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"},
    "qwen25": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "plain": ["<tool_call>", "</tool_call>"]},
    "qwen3": {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "plain": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    },
    "llama3": {
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
        "special": ["<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"],
    },
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "special": ["<start_of_turn>", "<end_of_turn>"]},
    "mistral": {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "special": [
            "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
        ],
    },
}  # fmt: skip

END_OF_TURN = {
    "chatml": "<|im_end|>",
    "qwen25": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    },
)


def template_text(family: str) -> str:
    return (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()


@cache
def family_tokenizer(model_path: str, family: str):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tokens = dict(FAMILIES[family])
    plain, special = tokens.pop("plain", []), tokens.pop("special", [])
    tokenizer.add_special_tokens({**tokens, "additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    tokenizer.chat_template = template_text(family)
    return tokenizer


@cache
def family_renderer(model_path: str, family: str) -> TemplateRenderer:
    return TemplateRenderer(family_tokenizer(model_path, family))
