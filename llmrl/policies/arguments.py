"""Keyword arguments that all policies accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from tensordict.utils import NestedKey

from llmrl._utils.types import InputMode, Tokenizer
from llmrl.engines import SamplingConfig
from llmrl.rendering import Renderer


class WrapperOptions(TypedDict, total=False):
    """Keyword arguments of every policy; see `LLMWrapperBase`."""

    tokenizer: Tokenizer | str | None
    renderer: Renderer | None
    chat_template: str | None
    chat_template_name: str | None
    input_mode: InputMode
    input_key: NestedKey | None
    attention_mask_key: NestedKey
    generate_kwargs: Mapping[str, object] | SamplingConfig | None
    return_log_probs: bool | None
    log_probs_key: str
    pad_output: bool
    pad_model_input: bool | None
    prefer_tokens: bool
    num_samples: int | None
    inplace: bool | Literal["empty"] | None
    conversation_mode: Literal["auto", "token", "message"]
    fork_threshold_tokens: int
