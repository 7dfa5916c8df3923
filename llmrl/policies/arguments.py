"""Arguments that all policies take, and those of TorchRL's that have no meaning here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict

from tensordict.utils import NestedKey

from llmrl._utils.types import Tokenizer
from llmrl.engines import SamplingConfig
from llmrl.rendering import Renderer

InputMode = Literal["history", "text", "tokens"]


class WrapperOptions(TypedDict, total=False):
    """Keywords of every policy, see `LLMWrapperBase`."""

    tokenizer: Tokenizer | str | None
    renderer: Renderer | None
    chat_template: str | None
    input_mode: InputMode
    input_key: NestedKey | None
    attention_mask_key: NestedKey
    generate_kwargs: Mapping[str, object] | SamplingConfig | None
    return_log_probs: bool | None
    log_probs_key: str
    pad_output: bool
    pad_model_input: bool | None
    num_samples: int | None
    inplace: bool | Literal["empty"] | None
    conversation_mode: Literal["auto", "token", "message"]
    fork_threshold_tokens: int


_ENTRIES = "entries have the names of the data contract, which losses and environments read"
_BATCHED = "requests of all threads are batched by the engine, without being asked to"

WRAPPER_ARGUMENTS: Mapping[str, str] = {
    "batching": _BATCHED,
    "batching_timeout": _BATCHED,
    "chat_template_name": "the tokenizer's own template is used, and needs no marks; another is chat_template=",
    "device": "a policy computes where its model is; use model.to(device)",
    "history_key": _ENTRIES,
    "layout": "entries are ragged; .as_nested_tensor(key) of a container makes a nested tensor",
    "masks_key": _ENTRIES,
    "max_batch_size": "pass max_num_seqs= to the engine",
    "min_batch_size": _BATCHED,
    "prefer_tokens": "tokens that are there are always preferred to their text",
    "text_key": _ENTRIES,
    "tokenizer_kwargs": "what a template reads is make_renderer(tokenizer, template_kwargs=...), passed as renderer=; "
    "padding is pad_output=",
    "tokens_key": _ENTRIES,
}
"""What to do instead of TorchRL's arguments of policies."""
