"""The TensorDict face of an engine: history, text or tokens in; the same keys out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, Literal

import torch
from tensordict import TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase

from llmrl._utils.arguments import refuse_unknown
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.types import Tokenizer
from llmrl.data import ChatHistory, History, LogProbs, Masks, Text, Tokens
from llmrl.data.tensordicts import batch_elements, container_of, non_tensor, plain, tensordict_of
from llmrl.engines import Completion, Engine, SamplingConfig, completion_budget
from llmrl.engines.border import check_completion
from llmrl.rendering import DEFAULT_FORK_THRESHOLD_TOKENS, Conversation, Renderer, make_renderer

_SAMPLING_SYNONYMS = {"max_tokens": "max_new_tokens", "stop_sequences": "stop"}


def sampling_from_kwargs(generate_kwargs: Mapping[str, object] | SamplingConfig | None) -> SamplingConfig:
    """Read TorchRL-style generation arguments; every name is known or refused.

    Raises:
        TypeError: for an unknown name, with the nearest known one.

    Example:
        >>> sampling_from_kwargs({"max_new_tokens": 8, "stop_sequences": ["END"]}).stop
        ('END',)
    """
    if isinstance(generate_kwargs, SamplingConfig):
        return generate_kwargs
    known = [field.name for field in fields(SamplingConfig)]
    arguments: dict[str, Any] = {}
    for name, value in (generate_kwargs or {}).items():
        name = _SAMPLING_SYNONYMS.get(name, name)
        refuse_unknown("generate_kwargs", [name], known)
        arguments[name] = value
    return SamplingConfig(**arguments)


class LLMWrapperBase(TensorDictModuleBase):
    """Generates with an engine, one completion for each conversation of a batch of any shape.

    Reads `(input_mode, "prompt")` and, when it is there, `"conversation"`, the exact token state that the previous
    turn left; writes `("tokens" | "log_probs" | "masks" | "policy_versions", ...)`, the response and full of the
    input mode, `"conversation"`, and `"finish_reason"`.

    Args:
        engine: whatever generates.
        renderer: messages to tokens and back; built from `tokenizer` when not given.
        tokenizer: of the model; needed for history and text.
        input_mode: `history`, `text` or `tokens`.
        generate_kwargs: sampling arguments by TorchRL's names, or a `SamplingConfig`.
        conversation_mode: `token`, `message` or `auto`, see `Conversation.start`.
        fork_threshold_tokens: drift from which a rewritten history forks the training row.

    Raises:
        ValueError: for an unknown `input_mode`, or without what it needs.
        TypeError: for an unknown sampling argument.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        renderer: Renderer | None = None,
        tokenizer: Tokenizer | None = None,
        input_mode: Literal["history", "text", "tokens"] = "history",
        generate_kwargs: Mapping[str, object] | SamplingConfig | None = None,
        conversation_mode: Literal["auto", "token", "message"] = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
    ) -> None:
        super().__init__()
        if input_mode not in ("history", "text", "tokens"):
            raise ValueError(f"input_mode must be 'history', 'text' or 'tokens', got {input_mode!r}.")
        if renderer is None and tokenizer is not None:
            renderer = make_renderer(tokenizer)
        if renderer is None and input_mode != "tokens":
            raise ValueError(f"input_mode={input_mode!r} needs a renderer or a tokenizer.")
        self.engine, self.renderer, self.input_mode = engine, renderer, input_mode
        sampling = sampling_from_kwargs(generate_kwargs)
        if renderer is not None:
            stop_token_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *renderer.stop_token_ids)))
            sampling = sampling.with_changes(stop_token_ids=stop_token_ids)
        self.sampling = sampling
        self._tokenizer = getattr(renderer, "tokenizer", tokenizer)
        self.conversation_mode = conversation_mode
        self.fork_threshold_tokens = fork_threshold_tokens
        self.in_keys = [(input_mode, "prompt")]
        self.out_keys = [
            (input_mode, "full"),
            ("tokens", "full"),
            ("log_probs", "full"),
            ("masks", "all_assistant_mask"),
            ("policy_versions", "full"),
            "conversation",
        ]

    @cached_property
    def _num_token_ids(self) -> int | None:
        """Asked for where the engine does not know: a whole vocabulary is read for it."""
        # A tokenizer may have holes between its ids: its number of tokens is not the first id that it has not.
        return None if self._tokenizer is None else 1 + max(self._tokenizer.get_vocab().values())

    @property
    def model(self) -> Engine:
        """The engine, by TorchRL's name."""
        return self.engine

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate for every conversation, all in flight at once; may be called from any thread."""

        async def generate_all() -> list[TensorDictBase]:
            return list(await asyncio.gather(*(self.generate(e) for e in batch_elements(tensordict))))

        elements = run_sync(generate_all())
        if not tensordict.batch_size:
            return elements[0]
        answered = lazy_stack(elements, 0)
        return answered if len(tensordict.batch_size) == 1 else answered.reshape(tensordict.batch_size)

    def check_tools(self) -> None:
        """Say before anything is sampled whether conversations with tools can be rendered.

        Raises:
            RenderingError: when they cannot, and what to do about it.
        """
        if self.renderer is not None and self.input_mode == "history":
            self.renderer.check_tools()

    async def generate(
        self,
        element: TensorDictBase,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        max_new_tokens: int | None = None,
    ) -> TensorDictBase:
        """Generate for one conversation (batch shape `[]`) and write the answer into it."""
        conversation = self.prepare(element)
        sampling = self.sampling
        if max_new_tokens is not None:
            sampling = sampling.with_changes(max_new_tokens=max_new_tokens)
        completion = await self.complete(
            conversation.prompt_ids, sampling, request_id=request_id, routing_key=routing_key
        )
        return self.write_turn(element, answered(conversation, completion), completion)

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
    ) -> Completion:
        """What the engine samples after `prompt_ids`, checked: every completion comes in here.

        Raises:
            ValueError: when the prompt leaves no room for a token.
            EngineError: when the engine died or refused, or answered with what could not be trained on or read again.
        """
        engine = self.engine
        completion = await engine.generate(prompt_ids, sampling, request_id=request_id, routing_key=routing_key)
        budget = completion_budget(len(prompt_ids), sampling, engine.max_model_len)
        vocab_size = self._num_token_ids if engine.vocab_size is None else engine.vocab_size
        check_completion(completion, budget=budget, vocab_size=vocab_size)
        return completion

    def prepare(self, element: TensorDictBase) -> Conversation:
        """The conversation of `element`, its prompt rendered, ready for the engine."""
        conversation = plain(element.get("conversation", None))
        if conversation is None:
            conversation = Conversation.start(
                self.renderer, mode=self.conversation_mode, fork_threshold_tokens=self.fork_threshold_tokens
            )
        prompt = element.get((self.input_mode, "prompt"), None)
        if prompt is None:
            raise KeyError(
                f"The policy reads {(self.input_mode, 'prompt')}, and the tensordict has "
                f"{sorted(map(str, element.keys(True)))}; reset an environment of input_mode={self.input_mode!r}."
            )
        if self.input_mode == "history":
            return conversation.with_prompt(prompt.chats, tools=plain(element.get("tools", None)))
        if self.input_mode == "text":
            assert self.renderer is not None
            return conversation.with_prompt_ids(self.renderer.encode(plain(prompt)))
        return conversation.with_prompt_ids(prompt.tolist())

    def write_turn(
        self, element: TensorDictBase, conversation: Conversation, completion: Completion, *, is_read: bool = True
    ) -> TensorDictBase:
        """Write an answered conversation into `element`: the history or text with its response, and what was sampled.

        Args:
            element: one conversation, batch shape `[]`.
            conversation: with `completion` as its last turn.
            completion: the engine's.
            is_read: whether anybody may read the turn's tensors, its response and its finish reason. Where nobody does,
                they are left out: training rows are made from the conversation.
        """
        element.set("conversation", non_tensor(conversation))
        if is_read or self.input_mode == "tokens":
            _write_tensors(element, conversation)
            element.set("finish_reason", non_tensor(completion.finish_reason))
        if self.input_mode == "history":
            prompt: History = element.get(("history", "prompt"))
            assert conversation.last is not None
            message = conversation.last.message
            histories = {"prompt": prompt, "full": History.from_chats((*prompt.chats, message), check=False)}
            if is_read:
                histories["response"] = History.from_chats([message], check=False)
            element.set("history", container_of(ChatHistory, histories))
        elif self.input_mode == "text":
            assert self.renderer is not None
            text_prompt = plain(element.get(("text", "prompt")))
            text_response = self.renderer.decode(completion.token_ids)
            element.set("text", Text(prompt=text_prompt, response=text_response, full=text_prompt + text_response))
        return element


def answered(conversation: Conversation, completion: Completion) -> Conversation:
    """The conversation after its prompt was completed so."""
    return conversation.with_completion(
        completion.token_ids, log_probs=completion.log_probs, versions=completion.versions
    )


def _write_tensors(element: TensorDictBase, conversation: Conversation) -> None:
    """Write the tokens of the last turn with their log-probs, masks and versions, as views of the conversation's."""
    assert conversation.node is not None
    split = conversation.num_tokens - conversation.node.num_completion_tokens
    token_ids, log_probs = conversation.tensor_view("token_ids"), conversation.tensor_view("log_probs")
    loss_mask, versions = conversation.tensor_view("loss_mask"), conversation.tensor_view("versions")
    tokens = {"prompt": token_ids[:split], "response": token_ids[split:], "full": token_ids}
    masks = {"all_attention_mask": torch.ones_like(loss_mask), "all_assistant_mask": loss_mask}
    element.set("tokens", container_of(Tokens, tokens))
    element.set("log_probs", container_of(LogProbs, {"response": log_probs[split:], "full": log_probs}))
    element.set("masks", container_of(Masks, masks))
    element.set("policy_versions", tensordict_of({"full": versions}))
