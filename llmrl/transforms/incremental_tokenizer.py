"""`IncrementalTokenizer`: writes the next prompt's tokens, tokenizing only new messages."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from tensordict.utils import NestedKey, unravel_key
from torchrl.data import Composite, NonTensor, Unbounded
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer
from llmrl.data import Tokens
from llmrl.data.templated_text import template_of_model
from llmrl.data.tensordicts import batch_elements, plain, restacked
from llmrl.rendering import DEFAULT_FORK_THRESHOLD_TOKENS, Conversation, Renderer, make_renderer


class IncrementalTokenizer(KnownArguments, Transform):
    r"""Writes `("tokens", "prompt")` `[num_tokens]` and `"conversation"` at reset and step.

    Policies render prompts themselves; append this transform last if other code needs the tokens in
    the environment's output. Policy and transform share one `Conversation`, so only messages that
    are new since the last turn are tokenized, and only once.

    Args:
        tokenizer, renderer: exactly one is needed; a renderer converts messages to tokens. For a tokenizer without a
            chat template, `History.apply_chat_template` chooses the template, with a warning.
        history_key: entry of the messages.
        tokens_key: entry of the tokens; `(NAME, "prompt")` is part of a `Tokens` container, others are plain tensors.
        mode, fork_threshold_tokens: see `Conversation.start`.

    Example:
        >>> from llmrl.testing.embedded_model import ensure_embedded_model
        >>> from llmrl.envs import DatasetChatEnv
        >>> from llmrl.rendering import TemplateRenderer
        >>> renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
        >>> data = DatasetChatEnv(["Hi"]).append_transform(IncrementalTokenizer(renderer=renderer)).reset()
        >>> renderer.decode(data["tokens", "prompt"])[-52:]
        '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        *,
        renderer: Renderer | None = None,
        mode: Literal["auto", "token", "message"] = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
        history_key: NestedKey = ("history", "prompt"),
        tokens_key: NestedKey = ("tokens", "prompt"),
    ) -> None:
        super().__init__()
        Conversation.start(renderer, mode=mode, fork_threshold_tokens=fork_threshold_tokens)  # checks the options
        if tokenizer is not None and renderer is None:
            renderer = _renderer_of(tokenizer)
        elif renderer is None or tokenizer is not None:
            raise ValueError("exactly one of tokenizer and renderer is needed, got both or neither.")
        self.history_key = unravel_key(history_key)
        self.tokens_key = unravel_key(tokens_key)
        self.renderer = renderer
        self.mode: Literal["auto", "token", "message"] = mode
        self.fork_threshold_tokens = fork_threshold_tokens

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for root, element in zip(batch_elements(tensordict), elements, strict=True):
            messages = element.get(self.history_key).chats
            conversation = plain(element.get("conversation", None))
            if conversation is None:
                conversation = Conversation.start(
                    self.renderer, mode=self.mode, fork_threshold_tokens=self.fork_threshold_tokens
                )
            if messages:  # a history drawn from the spec is empty
                conversation = conversation.with_prompt(messages, tools=plain(root.get("tools", None)))
            element.set("conversation", NonTensorData(conversation))
            token_ids = conversation.tensor_view("token_ids")
            if self._is_turn:
                element.set(self.tokens_key[0], Tokens(prompt=token_ids))
            else:
                element.set(self.tokens_key, token_ids)
        return restacked(elements, next_tensordict.batch_size)

    @property
    def _is_turn(self) -> bool:
        return isinstance(self.tokens_key, tuple) and self.tokens_key[1:] == ("prompt",)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._step(tensordict_reset, tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the prompt's tokens and the conversation."""
        shape = observation_spec.shape
        if self._is_turn:
            observation_spec[self.tokens_key[0]] = Tokens.default_spec(shape, ("prompt",))
        else:
            observation_spec[self.tokens_key] = Unbounded((*shape, -1), dtype=torch.int64)
        observation_spec["conversation"] = NonTensor(shape=tuple(shape), example_data=None)
        return observation_spec


def _renderer_of(tokenizer: Tokenizer) -> Renderer:
    if getattr(tokenizer, "chat_template", None):
        return make_renderer(tokenizer)
    name = str(getattr(tokenizer, "name_or_path", ""))
    warnings.warn(
        f"The tokenizer {name!r} has no chat template, so IncrementalTokenizer uses the template that "
        "History.apply_chat_template chooses; to set another, pass renderer=TemplateRenderer(tokenizer, "
        "chat_template=...).",
        stacklevel=3,
    )
    return make_renderer(tokenizer, chat_template=template_of_model(name, has_own=False))
