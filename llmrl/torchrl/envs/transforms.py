"""Transforms of `torchrl.envs.llm.transforms`: thinking prompts, and conversations as text or tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from tensordict import NonTensorData, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Composite, NonTensor, TensorSpec
from torchrl.envs import Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Tokenizer as PretrainedTokenizer
from llmrl.data import History, Message, Text, text_of
from llmrl.data.tensordicts import batch_elements, container_of, non_tensor, plain, restacked
from llmrl.rendering import TemplateRenderer
from llmrl.transforms.parts import is_reward_written_before

_PROMPTS: dict[str, tuple[str, ...]] = {
    "assistant": (
        "But wait, let me think about this more carefully...",
        "Let me check this once more, step by step.",
        "Something may be wrong here; let me go through it again.",
    ),
    "user": (
        "Think about it more carefully, and answer again.",
        "Are you sure? Check it step by step.",
        "Go through your reasoning again, and correct what is wrong.",
    ),
}


class AddThinkingPrompt(KnownArguments, Transform):
    """Asks for another attempt after an answer that meets a condition, and lets the conversation continue.

    Append this transform after the transform that writes the reward. The prompt replaces the text
    from the answer's last `<answer>` to its end, or is appended if there is no `<answer>`; without
    `edit_last_turn`, or after a reply of a tool or the environment, it is a new message. The rest
    of the answer keeps its sampled tokens. If more than half of the answer is replaced, the
    original answer becomes a separate row.

    Args:
        cond: function of the `next` entries of one conversation; it returns whether to ask again.
        prompt: text of the prompt; by default a built-in one.
        random_prompt: whether to choose randomly among the built-in prompts.
        role: `assistant` for a prompt in the first person, or `user`.
        edit_last_turn: whether to write the prompt into the last answer.
        zero_reward: whether to set the reward of the answer to 0; by default the value of `edit_last_turn`.
        undo_done: whether to clear the done flags, `truncated` included.

    Raises:
        ValueError: if the role is unknown, if `edit_last_turn` is combined with the role `user`, or
            if both prompt options are given.
        KeyError: at a step, if `cond` reads a reward that no transform before this one writes.

    Example:
        >>> from llmrl.data import ChatHistory
        >>> from llmrl.envs import ChatEnv
        >>> from llmrl.transforms import RubricReward
        >>> from tensordict import TensorDict
        >>> def exact(completion):
        ...     return float(completion == "15")
        >>> env = ChatEnv().append_transform(RubricReward(exact))
        >>> env = env.append_transform(AddThinkingPrompt(lambda step: step["reward"].sum() < 1, "Wait."))
        >>> data = env.reset(TensorDict({"query": "7 + 8 ="}))
        >>> full = data["history"].prompt.append({"role": "assistant", "content": "14"})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> env.step(data)["next", "history"].prompt.content
        ['7 + 8 =', '14 Wait.']
    """

    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool | torch.Tensor],
        prompt: str | None = None,
        *,
        random_prompt: bool = False,
        role: Literal["user", "assistant"] = "assistant",
        edit_last_turn: bool = True,
        zero_reward: bool | None = None,
        undo_done: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if role not in _PROMPTS:
            raise ValueError(f"role must be 'user' or 'assistant', got {role!r}.")
        if edit_last_turn and role != "assistant":
            raise ValueError(
                "edit_last_turn=True, the default, needs role='assistant', because the prompt becomes a part of the "
                "answer; for role='user' set edit_last_turn=False."
            )
        if prompt is not None and random_prompt:
            raise ValueError("prompt and random_prompt exclude each other; give one of them.")
        prompts = _PROMPTS[role]
        if prompt is not None:
            prompts = (prompt,)
        elif not random_prompt:
            prompts = prompts[:1]
        self.cond = cond
        self.role = role
        self.edit_last_turn = edit_last_turn
        self.prompts = prompts
        self.zero_reward = edit_last_turn if zero_reward is None else zero_reward
        self.undo_done = undo_done
        self._random = random.Random(seed)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        has_reward = is_reward_written_before(self)
        for element in elements:
            seen = element
            if not has_reward:
                seen = element.copy()
                seen.pop("reward", None)
            if self._meets_condition(seen):
                self._ask_again(element)
        return restacked(elements, next_tensordict.batch_size)

    def _meets_condition(self, element: TensorDictBase) -> bool:
        try:
            return bool(self.cond(element))
        except KeyError as error:
            if "reward" in element:
                raise
            raise KeyError(
                "the condition of AddThinkingPrompt reads an entry that does not exist. If it reads the reward, append "
                "AddThinkingPrompt after the transform that writes the reward."
            ) from error

    def _ask_again(self, element: TensorDictBase) -> None:
        history = element.get(("history", "prompt"))
        prompt = self._random.choice(self.prompts)
        # The history of a random action may be empty, and the last message that of a tool.
        if self.edit_last_turn and history.chats and history.chats[-1]["role"] == "assistant":
            *earlier, last = history.chats
            kept = text_of(last.get("content")).rsplit("<answer>", 1)[0]
            edited: Message = {**last, "content": f"{kept} {prompt}".lstrip()}
            history = History.from_chats((*earlier, edited))
        else:
            history = history.append({"role": self.role, "content": prompt})
        element.set(("history", "prompt"), history)
        if self.zero_reward:
            element.set("reward", torch.zeros_like(element.get("reward")))
        if self.undo_done:
            for key in {"done", "terminated", "truncated"} & set(element.keys()):
                element.set(key, torch.zeros_like(element.get(key)))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return tensordict_reset


class Tokenizer(KnownArguments, Transform):
    """Tokenizes text entries to `[num_tokens]`, and decodes a policy's tokens for the environment.

    Use it for text that is not a conversation, such as in an `LLMEnv`. In a `ChatEnv`, the policy
    or an `IncrementalTokenizer` tokenizes conversations and keeps the sampled tokens.

    Args:
        in_keys, out_keys: text entries of the environment's output, and entries for their token ids.
        in_keys_inv, out_keys_inv: text entries that the environment reads, and the policy's token ids for them.
        tokenizer: a Hugging Face tokenizer, or its name.
        skip_special_tokens, add_special_tokens: options of decoding and encoding.
        return_attention_mask: whether to write `"attention_mask"`, ones of the same length, next to the token ids.
        call_before_reset: whether to tokenize the input of a reset instead of the output; to
            include a primer's rows, insert this transform before the primer.

    Raises:
        ValueError: if two lists of keys that belong together differ in length.
        KeyError: if an entry is missing.

    Example:
        >>> from tensordict import TensorDict
        >>> class Bytes:
        ...     def encode(self, text, add_special_tokens):
        ...         return list(text.encode())
        >>> transform = Tokenizer(["text"], ["tokens"], tokenizer=Bytes())
        >>> transform(TensorDict({"text": "Hi"}))["tokens"]
        tensor([ 72, 105])
    """

    reads_turns = True

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
        *,
        tokenizer: PretrainedTokenizer | str,
        skip_special_tokens: bool = True,
        add_special_tokens: bool = False,
        return_attention_mask: bool = True,
        call_before_reset: bool = False,
    ) -> None:
        pairs = {"in_keys": (in_keys, out_keys), "in_keys_inv": (in_keys_inv, out_keys_inv)}
        for name, (left, right) in pairs.items():
            if len(left or ()) != len(right or ()):
                raise ValueError(f"{name} and its out_keys must be equally many, got {left} and {right}.")
        super().__init__(*(list(keys or ()) for keys in (in_keys, out_keys, in_keys_inv, out_keys_inv)))
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            self.tokenizer: PretrainedTokenizer = AutoTokenizer.from_pretrained(tokenizer)
        else:
            self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.add_special_tokens = add_special_tokens
        self.return_attention_mask = return_attention_mask
        self.call_before_reset = call_before_reset

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Tokenize the texts of a batch of any shape."""
        return self._each(tensordict, self._tokenize)

    def _tokenize(self, element: TensorDictBase) -> None:
        for in_key, out_key in zip(self.in_keys, self.out_keys, strict=True):
            text = plain(_entry(element, in_key))
            token_ids = self.tokenizer.encode(text, add_special_tokens=self.add_special_tokens)
            written = torch.tensor(token_ids, dtype=torch.int64, device=element.device)
            element.set(out_key, written)
            if self.return_attention_mask:
                element.set(_mask_key(out_key), torch.ones_like(written))

    def _decode(self, element: TensorDictBase) -> None:
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            token_ids = _entry(element, out_key).tolist()
            text = self.tokenizer.decode(token_ids, skip_special_tokens=self.skip_special_tokens)
            element.set(in_key, non_tensor(text))

    @staticmethod
    def _each(tensordict: TensorDictBase, write: Callable[[TensorDictBase], None]) -> TensorDictBase:
        elements = batch_elements(tensordict)
        for element in elements:
            write(element)
        return restacked(elements, tensordict.batch_size)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        if self.call_before_reset:
            return next_tensordict
        return self._each(next_tensordict, self._tokenize)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self._call(tensordict_reset)

    def _reset_env_preprocess(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        # Without a tensordict there is no text yet: the environment draws a prompt or raises.
        if tensordict is None or not self.call_before_reset:
            return tensordict
        return self._each(tensordict, self._tokenize)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self.in_keys_inv:
            return tensordict
        return self._each(tensordict, self._decode)

    def _spec(self, shape: torch.Size) -> Bounded:
        return Bounded(0, len(self.tokenizer) - 1, shape=(*shape, -1), dtype=torch.int64)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the token entries."""
        if self.call_before_reset:
            return observation_spec
        shape = observation_spec.shape
        for out_key in self.out_keys:
            observation_spec[out_key] = self._spec(shape)
            if self.return_attention_mask:
                observation_spec[_mask_key(out_key)] = Bounded(1, 1, shape=(*shape, -1), dtype=torch.int64)
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Replace the environment's text inputs by tokens."""
        for in_key, out_key in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            _replace_input(input_spec, in_key, out_key, self._spec(input_spec.shape))
        return input_spec


def _mask_key(out_key: NestedKey) -> NestedKey:
    return "attention_mask" if isinstance(out_key, str) else (*out_key[:-1], "attention_mask")


def _entry(element: TensorDictBase, key: NestedKey) -> torch.Tensor | NonTensorData:
    value = element.get(key, None)
    if value is None:
        raise KeyError(f"there is no entry {key!r} to read, only {sorted(map(str, element.keys()))}.")
    return value


class TemplateTransform(Transform):
    r"""Renders the conversation to `("text", "prompt")`, with the generation prompt, and parses the policy's answer.

    The policy's `("text", "response")` is parsed (reasoning, tool calls) and appended as an assistant message in
    `("history", "full")`. Append this transform last. Each turn renders and tokenizes the whole prompt again; to keep
    the sampled tokens, and in collectors, let the policy read the history instead.

    Args:
        tokenizer: tokenizer with a chat template.
        chat_template: Jinja template that replaces the tokenizer's own.
        renderer: renderer of messages to text and back, instead of `tokenizer`.

    Raises:
        ValueError: unless exactly one of tokenizer and renderer is given.
        RenderingError: if the template cannot be parsed back, or if a message contains a special token.

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
        tokenizer: PretrainedTokenizer | None = None,
        chat_template: str | None = None,
        *,
        renderer: TemplateRenderer | None = None,
    ) -> None:
        super().__init__()
        if tokenizer is not None and renderer is None:
            renderer = TemplateRenderer(tokenizer, chat_template=chat_template)
        elif renderer is None or tokenizer is not None or chat_template is not None:
            raise ValueError(
                "pass either a tokenizer (and optionally chat_template) or a renderer, not both or neither."
            )
        self.renderer = renderer

    def _render(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(next_tensordict)
        for root, element in zip(batch_elements(tensordict), elements, strict=True):
            messages = element.get(("history", "prompt")).chats
            tools = plain(root.get("tools", None))
            text = ""
            if messages:  # a history drawn from the spec is empty
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
                raise KeyError(
                    "there is no ('text', 'response'); use a policy with input_mode='text', which writes it."
                )
            parsed = self.renderer.parse(self.renderer.encode(response), tools=plain(element.get("tools", None)))
            messages = (*element.get(("history", "prompt")).chats, parsed.message)
            element.set(("history", "full"), History.from_chats(messages, check=False))
        return restacked(elements, tensordict.batch_size)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the prompt's text."""
        observation_spec["text"] = Text.default_spec(observation_spec.shape, ("prompt",))
        return observation_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Replace the environment's history input by text."""
        shape = input_spec.shape
        response = NonTensor(shape=tuple(shape), example_data="")
        _replace_input(input_spec, ("history", "full"), ("text", "response"), response)
        return input_spec


def _replace_input(input_spec: Composite, inner: NestedKey, outer: NestedKey, spec: TensorSpec) -> None:
    """Replace the input entry `inner` by `outer` in place. Raises KeyError if the environment does not read it."""
    parts = [input_spec[name] for name in ("full_action_spec", "full_state_spec") if name in input_spec]
    for part in parts:
        if inner in part.keys(True):
            del part[inner]
            if not isinstance(inner, str) and len(inner) > 1 and part[inner[:-1]].is_empty():
                del part[inner[:-1]]
            part[outer] = spec
            return
    known = sorted(str(key) for part in parts for key in part.keys(True, True))
    raise KeyError(f"the environment does not read {inner!r}, only {known}; name one of these in in_keys_inv.")
