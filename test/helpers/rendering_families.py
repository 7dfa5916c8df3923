"""Chat templates in the manner of known model families, over the embedded model's tokenizer."""

from __future__ import annotations

import copy
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

# Families that differ from these in one thing each, in turns, tools or calls; their templates show it.
PECULIAR_FAMILIES = {
    "gpt_oss": {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "special": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"],
    },
    "gemma4": {
        "bos_token": "<bos>",
        "eos_token": "<turn|>",
        "special": [
            "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
            '<|"|>',
        ],
    },
    "glm4": {
        "eos_token": "<|endoftext|>",
        "special": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    },
    "glm45": {
        "eos_token": "<|endoftext|>",
        "special": ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
        "plain": [
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
            "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        ],
    },
    "cohere": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "special": ["<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"],
    },
    "command_r7b": {
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "special": [
            "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>",
            "<|END_RESPONSE|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>",
            "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>",
        ],
    },
    "lfm2": {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|im_end|>",
        "special": [
            "<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>",
            "<|tool_response_start|>", "<|tool_response_end|>",
        ],
    },
    "deepseek": {
        "bos_token": "<｜begin▁of▁sentence｜>",
        "eos_token": "<｜end▁of▁sentence｜>",
        "special": [
            "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        ],
        "plain": ["<think>", "</think>"],
    },
    "qwen3_coder": {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "plain": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
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
    return (Path(__file__).parents[1] / "templates" / f"{family}.jinja").read_text()


@cache
def embedded_tokenizer(model_path: str):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@cache
def family_tokenizer(model_path: str, family: str):
    tokenizer = copy.deepcopy(embedded_tokenizer(model_path))
    tokens = dict({**FAMILIES, **PECULIAR_FAMILIES}[family])
    plain, special = tokens.pop("plain", []), tokens.pop("special", [])
    tokenizer.add_special_tokens({**tokens, "additional_special_tokens": special})
    tokenizer.add_tokens(plain)
    tokenizer.chat_template = template_text(family)
    return tokenizer


@cache
def family_renderer(model_path: str, family: str, **arguments) -> TemplateRenderer:
    return TemplateRenderer(family_tokenizer(model_path, family), **arguments)
