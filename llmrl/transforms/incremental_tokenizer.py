"""`IncrementalTokenizer`: writes the next prompt's tokens, tokenizing only new messages."""

from __future__ import annotations

from typing import Literal

from tensordict import NonTensorData, TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer
from llmrl.data import Tokens
from llmrl.data.tensordicts import batch_elements, plain, restacked
from llmrl.rendering import DEFAULT_FORK_THRESHOLD_TOKENS, Conversation, Renderer, make_renderer


class IncrementalTokenizer(KnownArguments, Transform):
    r"""Writes `("tokens", "prompt")` `[num_tokens]` and `"conversation"` at reset and step.

    Policies render prompts themselves; append this transform last if other code needs them in the environment's
    output. Both share the same `Conversation`, so only messages that are new since the last turn are tokenized, once.

    Args:
        tokenizer, renderer: exactly one is needed; a renderer converts messages to tokens.
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
    ) -> None:
        super().__init__()
        if tokenizer is not None and renderer is None:
            renderer = make_renderer(tokenizer)
        elif renderer is None or tokenizer is not None:
            raise ValueError("exactly one of tokenizer and renderer is needed.")
        self.renderer = renderer
        self.mode: Literal["auto", "token", "message"] = mode
        self.fork_threshold_tokens = fork_threshold_tokens

    def _tokenize(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for root, element in zip(batch_elements(tensordict), elements, strict=True):
            messages = element.get(("history", "prompt")).chats
            conversation = plain(element.get("conversation", None))
            if conversation is None:
                conversation = Conversation.start(
                    self.renderer, mode=self.mode, fork_threshold_tokens=self.fork_threshold_tokens
                )
            if messages:  # a history drawn from the spec is empty
                conversation = conversation.with_prompt(messages, tools=plain(root.get("tools", None)))
            element.set("conversation", NonTensorData(conversation))
            element.set("tokens", Tokens(prompt=conversation.tensor_view("token_ids")))
        return restacked(elements, next_tensordict.batch_size)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._tokenize(tensordict, next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._tokenize(tensordict_reset, tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the prompt's tokens and the conversation."""
        shape = observation_spec.shape
        observation_spec["tokens"] = Tokens.default_spec(shape, ("prompt",))
        observation_spec["conversation"] = NonTensor(shape=tuple(shape), example_data=None)
        return observation_spec
