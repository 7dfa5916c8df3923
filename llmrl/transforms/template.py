"""`TemplateTransform`: a conversation as templated text, for a policy that reads and writes text."""

from __future__ import annotations

from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs import Transform

from llmrl._utils.types import Tokenizer
from llmrl.data import History, Text
from llmrl.data.tensordicts import batch_elements, container_of, non_tensor, plain, restacked
from llmrl.rendering import TemplateRenderer
from llmrl.transforms.specs import replace_input


class TemplateTransform(Transform):
    r"""Writes `("text", "prompt")`, the conversation up to where the assistant is to speak, and reads its answer.

    A policy writes `("text", "response")`; on the way into the environment it is parsed (reasoning, tool calls) and
    appended as the assistant's message, `("history", "full")`. Append it last. Each prompt is rendered and tokenized
    afresh: for tokens that stay as they were sampled, and in collectors, let the policy read the history, which needs
    no transform.

    Args:
        tokenizer: the model's tokenizer, which has the chat template; or pass a `renderer`.
        chat_template: Jinja text; the tokenizer's own by default.
        renderer: messages to text and back.

    Raises:
        ValueError: unless exactly one of tokenizer and renderer is given.
        RenderingError: if the template cannot be read back; see `TemplateRenderer`. In a step, for a message with a
            special token, which a policy of text could not tell from the template's own.

    Example:
        >>> from llmrl.testing.embedded_model import ensure_embedded_model
        >>> from llmrl.envs import DatasetChatEnv
        >>> renderer = TemplateRenderer.from_pretrained(str(ensure_embedded_model()))
        >>> env = DatasetChatEnv(["Hi"]).append_transform(TemplateTransform(renderer=renderer))
        >>> data = env.reset()
        >>> data["text"].prompt[-52:]
        '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
        >>> data["text", "response"] = "Hello.<|im_end|>"
        >>> env.step(data)["next", "history"].prompt.content[-1]
        'Hello.'
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None = None,
        chat_template: str | None = None,
        *,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        super().__init__()
        if tokenizer is not None and renderer is None:
            renderer = TemplateRenderer(tokenizer, chat_template=chat_template)
        elif renderer is None or tokenizer is not None or chat_template is not None:
            raise ValueError("either a tokenizer (and its chat_template) or a renderer is needed.")
        self.renderer = renderer

    def _render(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for root, element in zip(batch_elements(tensordict), elements, strict=True):
            messages = element.get(("history", "prompt")).chats
            tools = plain(root.get("tools", None))
            text = ""
            if messages:  # a history drawn from the spec has none
                self.renderer.content_marks.refuse(messages, tools)
                text = self.renderer.render_text(messages, tools=tools, add_generation_prompt=True)
            element.set("text", container_of(Text, {"prompt": non_tensor(text)}))
        return restacked(elements, next_tensordict.batch_size)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self._render(tensordict, next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._render(tensordict_reset, tensordict_reset)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(tensordict)
        for element in elements:
            response = plain(element.get(("text", "response"), None))
            if response is None:
                raise KeyError("there is no ('text', 'response'), which a policy writes; make it one of text.")
            parsed = self.renderer.parse(self.renderer.encode(response), tools=plain(element.get("tools", None)))
            messages = (*element.get(("history", "prompt")).chats, parsed.message)
            element.set(("history", "full"), History.from_chats(messages, check=False))
        return restacked(elements, tensordict.batch_size)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add what it writes: the prompt's text."""
        observation_spec["text"] = Text.default_spec(observation_spec.shape, ("prompt",))
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Read text where the environment reads a history."""
        shape = input_spec.shape
        response = NonTensor(shape=tuple(shape), example_data="")
        replace_input(input_spec, ("history", "full"), ("text", "response"), response)
        return input_spec
