"""Chat templates as models were published with them, read from the package trl, and tokenizers that fit them.

The files are read where they are installed: trl itself is not imported. Families that it lacks are rewritten in
`templates/`, with what is peculiar to them. A tokenizer is the embedded model's with the tokens added that the template
writes, special or not as in the model's own.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from functools import cache
from pathlib import Path

from rendering_families import embedded_tokenizer, template_text

from llmrl.rendering import TemplateRenderer

# By the beginning of a file's name, the longest that fits: the tokens that begin a text and that end one.
_BEGIN_AND_END = {
    "apertus": ("<s>", "<|assistant_end|>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": ("<bos>", "<turn|>"),
    "gemma": ("<bos>", "<eos>"),
    "gemma4": ("<bos>", "<turn|>"),
    "glm": (None, "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>"),
    "kimi": ("[BOS]", "<|im_end|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava_next": ("<s>", "</s>"),
    "minimax": ("]~!b[", "[e~["),
    "muse_glimmer": ("<|begin_of_text|>", "<|eot|>"),
    "nemotron_3": ("<s>", "<|im_end|>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "qwen": (None, "<|im_end|>"),
    "seed": ("<seed:bos>", "<seed:eos>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}
_SPECIAL = re.compile(
    r"<\|[^<>|{}'\s]+\|>|<｜[^<>{}'\s]+｜>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?INST\]|\[gMASK\]|<sop>|<image>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|\]~b\]|｜DSML｜|\]<\]minimax\[>\["
)
# Tokens that models' tokenizers have, without calling them special.
_PLAIN = re.compile(r"</?(?:think|(?:minimax:|seed:)?tool_call|tool_response|arg_key|arg_value)>")


def _folder() -> Path:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.submodule_search_locations, "trl is not installed: make setup"
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


# Those for training differ from the models' own in marks around what is trained, and in thoughts that they keep.
TEMPLATES = sorted(path.stem for path in _folder().glob("*.jinja"))
PUBLISHED = [name for name in TEMPLATES if not name.endswith("_training")]
REWRITTEN = ["apertus", "deepseek_v32", "deepseek_v4", "kimi_k2", "minimax_m2", "minimax_m3", "seed_oss"]


def real_template(name: str) -> str:
    if name in REWRITTEN:
        return template_text(name)
    return (_folder() / f"{name}.jinja").read_text(encoding="utf-8")


def template_tokenizer(model_path: str, template: str, begin: str | None, end: str):
    """The embedded model's tokenizer with a template and the tokens that it writes."""
    tokenizer = copy.deepcopy(embedded_tokenizer(model_path))
    begin_or_end = {"bos_token": begin or end, "eos_token": end, "pad_token": end}
    special = sorted(set(_SPECIAL.findall(template)) - {begin, end})
    tokenizer.add_special_tokens({**begin_or_end, "additional_special_tokens": special})
    tokenizer.add_tokens(sorted(set(_PLAIN.findall(template))))
    tokenizer.chat_template = template
    return tokenizer


@cache
def real_tokenizer(model_path: str, name: str):
    begin, end = _BEGIN_AND_END[max((each for each in _BEGIN_AND_END if name.startswith(each)), key=len)]
    return template_tokenizer(model_path, real_template(name), begin, end)


@cache
def real_renderer(model_path: str, name: str, **arguments) -> TemplateRenderer:
    return TemplateRenderer(real_tokenizer(model_path, name), **arguments)
