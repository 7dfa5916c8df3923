"""`LLMWrapperBase`: an engine as a TensorDict module for histories, text or tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self, cast
from weakref import WeakKeyDictionary

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from tensordict.utils import NestedKey

from llmrl._utils.arguments import KnownArguments, check_choice, check_least
from llmrl._utils.asynchronous import run_sync
from llmrl._utils.types import InputMode, Tokenizer
from llmrl.data import CONTEXT_VERSION, ChatHistory, History, LogProbs, Masks, Text, Tokens
from llmrl.data.routed_experts import ROUTED_EXPERTS_KEY, routed_experts_entry
from llmrl.data.sampling_mask import SAMPLING_MASK_KEY, sampling_mask_entry
from llmrl.data.templated_text import template_named
from llmrl.data.tensordicts import batch_elements, container_of, non_tensor, plain, restacked, tensordict_of
from llmrl.engines import Completion, Engine, SamplingConfig, completion_budget
from llmrl.engines.base import check_supported
from llmrl.engines.completion_checks import check_completion, check_routed_experts
from llmrl.engines.token_stream import TokenStream
from llmrl.policies.sampling import sampling_from_kwargs
from llmrl.rendering import DEFAULT_FORK_THRESHOLD_TOKENS, Conversation, Renderer, make_renderer

_num_ids: WeakKeyDictionary[Tokenizer, tuple[int, int]] = WeakKeyDictionary()
"""Cache of the number of tokens and of ids of each tokenizer."""


class LLMWrapperBase(KnownArguments, TensorDictModuleBase):
    """A policy that generates one completion for each conversation of a batch of any shape.

    Reads `(input_mode, "prompt")` and, if present, `"conversation"`, the exact tokens of earlier turns. Writes
    `prompt`, `response` and `full` of the input mode, `"tokens"`, `"log_probs"` and `"masks"`, and
    `("policy_versions", "full")`, `"conversation"`, `"finish_reason"` and, outside a collector, `"text"`.

    Args:
        model: engine that generates.
        renderer: renderer from messages to tokens and back; by default made from `tokenizer`.
        tokenizer: the model's tokenizer, or its name; needed for history and text.
        chat_template: Jinja template that replaces the tokenizer's.
        chat_template_name: name of a chat template, instead of `chat_template`; see `History.apply_chat_template`.
        input_mode: form of the conversations: `history`, `text` or `tokens`.
        input_key: entry to read instead of `(input_mode, "prompt")`.
        attention_mask_key: entry that marks the padding of tokens, if present.
        generate: whether to generate; only a `TransformersWrapper` can score instead.
        generate_kwargs: sampling arguments by TorchRL's names, or a `SamplingConfig`.
        return_log_probs: whether to write log-probs.
        log_probs_key: container of the log-probs.
        pad_output: whether to pad entries to one length: prompts on the left, responses on the right.
        prefer_tokens: whether to score the existing tokens of a history; False renders the history
            again and replaces them. Generation always keeps sampled tokens.
        pad_model_input: ignored; model input is packed or batched exactly.
        num_samples: number of completions for each conversation, in a new last dimension of the batch.
        inplace: whether to update and return the input tensordict; False, or TorchRL's `"empty"`,
            returns only the written entries. By default true without `num_samples`.
        conversation_mode: `token`, `message` or `auto`; see `Conversation.start`.
        fork_threshold_tokens: number of replaced tokens from which a rewritten history starts a new training row.

    Raises ValueError if `input_mode` is unknown or lacks its renderer, or arguments contradict each
    other, and TypeError if `model` is no engine, or if an argument is unknown, with an alternative for those of
    TorchRL.
    """

    return_text = return_masks = return_tokens = True
    _can_score = False

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        """Refuse unknown keywords, and store the others for `get_new_version`."""
        made = super().__new__(cls, *args, **kwargs)
        made._keywords = {name: value for name, value in kwargs.items() if name != "model"}
        return made

    def __init__(
        self,
        model: Engine | None,
        *,
        renderer: Renderer | None = None,
        tokenizer: Tokenizer | str | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        input_mode: InputMode = "history",
        input_key: NestedKey | None = None,
        attention_mask_key: NestedKey = "attention_mask",
        generate: bool = True,
        generate_kwargs: Mapping[str, object] | SamplingConfig | None = None,
        return_log_probs: bool | None = None,
        log_probs_key: str = "log_probs",
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        prefer_tokens: bool = True,
        num_samples: int | None = None,
        inplace: bool | Literal["empty"] | None = None,
        conversation_mode: Literal["auto", "token", "message"] = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
    ) -> None:
        super().__init__()
        self._check_arguments(
            renderer=renderer,
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            input_mode=input_mode,
            generate=generate,
            generate_kwargs=generate_kwargs,
            return_log_probs=return_log_probs,
            num_samples=num_samples,
            inplace=inplace,
            conversation_mode=conversation_mode,
            fork_threshold_tokens=fork_threshold_tokens,
        )
        if chat_template_name is not None:
            chat_template = template_named(chat_template_name)
        if isinstance(tokenizer, str):
            from transformers import AutoTokenizer

            tokenizer = cast(Tokenizer, AutoTokenizer.from_pretrained(tokenizer))
        if chat_template is None and tokenizer is not None:
            chat_template = self._template_of(tokenizer)
        self.generate = generate
        self.input_mode = input_mode
        self.input_key = input_key or (input_mode, "prompt" if generate else "full")
        self.attention_mask_key = attention_mask_key
        self.log_probs_key = log_probs_key
        self.return_log_probs = return_log_probs is not False
        self.pad_output = pad_output
        self.num_samples = num_samples
        self.chat_template = chat_template
        self.prefer_tokens = prefer_tokens
        self.inplace = num_samples is None if inplace is None else inplace is True
        self.in_keys = [self.input_key]
        written = dict.fromkeys(("text", "masks", "tokens"), True)
        written |= {log_probs_key: self.return_log_probs, "history": self.return_history}
        self.out_keys = [name for name, is_written in written.items() if is_written]
        self.sampling = sampling_from_kwargs(generate_kwargs)
        self.tokenizer: Tokenizer | None = getattr(renderer, "tokenizer", tokenizer)
        self.conversation_mode = conversation_mode
        self.fork_threshold_tokens = fork_threshold_tokens
        self.renderer = renderer
        if not generate:
            return
        if model is not None and not hasattr(model, "max_model_len"):  # a subclass may set its own engine later
            raise TypeError(f"model must be an engine, such as AsyncVLLM or TransformersEngine, got {model!r:.80}.")
        self.engine: Engine = model  # type: ignore[assignment]
        check_supported(model, self.sampling)
        self.model: Any = model
        if renderer is None and tokenizer is not None:
            if chat_template is None:
                renderer = make_renderer(tokenizer)
            else:
                renderer = make_renderer(tokenizer, chat_template=chat_template)
            self.renderer = renderer
        if renderer is None and input_mode != "tokens":
            raise ValueError(f"input_mode={input_mode!r} needs a renderer or a tokenizer.")
        if renderer is not None:
            stop_token_ids = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *renderer.stop_token_ids)))
            self.sampling = self.sampling.with_changes(stop_token_ids=stop_token_ids)

    def _check_arguments(
        self,
        *,
        renderer: Renderer | None = None,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        input_mode: InputMode = "history",
        generate: bool = True,
        generate_kwargs: Mapping[str, object] | SamplingConfig | None = None,
        return_log_probs: bool | None = None,
        num_samples: int | None = None,
        inplace: bool | Literal["empty"] | None = None,
        conversation_mode: Literal["auto", "token", "message"] = "auto",
        fork_threshold_tokens: int = DEFAULT_FORK_THRESHOLD_TOKENS,
        **_: object,
    ) -> None:
        """Raise the errors of arguments that need no engine, which may not be started yet."""
        if input_mode not in ("history", "text", "tokens"):
            raise ValueError(f"input_mode must be one of 'history', 'text' or 'tokens', got {input_mode!r}.")
        check_choice(("auto", "token", "message"), conversation_mode=conversation_mode)
        check_least(0, fork_threshold_tokens=fork_threshold_tokens)
        check_choice((True, False, None, "empty"), inplace=inplace)
        templates = zip(_TEMPLATES, (renderer, chat_template, chat_template_name), strict=True)
        given = [name for name, value in templates if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} each choose the template: pass one of them.")
        if not generate and not self._can_score:
            raise ValueError("generate=False needs a model that scores: TransformersWrapper(model, generate=False).")
        if not generate and return_log_probs is False:
            raise ValueError("return_log_probs must be True when generate=False: there is nothing else to return.")
        check_least(1, num_samples=num_samples)
        if num_samples is not None and (inplace or not generate):
            raise ValueError(
                f"num_samples={num_samples} needs inplace=False (or None) and generate=True, got inplace={inplace} and "
                f"generate={generate}."
            )
        if chat_template_name is not None:
            template_named(chat_template_name)
        sampling_from_kwargs(generate_kwargs)

    def _template_of(self, tokenizer: Tokenizer) -> str | None:
        """Return a template that replaces the tokenizer's, or None; a subclass may choose one."""
        return None

    @property
    def return_history(self) -> bool:
        """Whether the history is written."""
        return self.input_mode == "history"

    @property
    def generate_kwargs(self) -> dict[str, object]:
        """Sampling arguments by TorchRL's names."""
        sampling = asdict(self.sampling)
        return {**sampling, "num_return_sequences": self.num_samples or 1, "do_sample": sampling["temperature"] > 0}

    def get_new_version(self, **kwargs: object) -> Self:
        """Return a policy with the same arguments except those given, which may include `model`.

        A given template (`renderer`, `chat_template` or `chat_template_name`) replaces this policy's, and a given
        tokenizer a renderer with another one.
        """
        keywords = {"model": self.model, "tokenizer": self.tokenizer, **self._keywords}
        if any(kwargs.get(name) is not None for name in _TEMPLATES):
            keywords.update(dict.fromkeys(_TEMPLATES))
        if kwargs.get("tokenizer") is not None and hasattr(keywords.get("renderer"), "tokenizer"):
            keywords["renderer"] = None
        keywords.update(kwargs)
        return type(self)(**keywords)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Generate for all conversations concurrently; may be called from any thread.

        If the policy has a seed, it is that of the first answer, and each further answer has the next one.
        """
        elements = batch_elements(tensordict)
        shape = tensordict.batch_size
        if self.num_samples is not None:
            shape = torch.Size((*shape, self.num_samples))
        if not self.inplace:
            elements = [element.copy() for element in elements for _ in range(self.num_samples or 1)]

        async def take_turns() -> None:
            await asyncio.gather(*map(self.take_turn, elements, self.sampling.for_answers(len(elements))))

        run_sync(take_turns())
        for element in elements:
            self.write_text(element)
        if self.pad_output and elements:
            _pad_turns(elements, self.log_probs_key, getattr(self.tokenizer, "pad_token_id", None) or 0)
        for element in elements:
            for key in {"tokens", "masks", self.log_probs_key} & element.keys():
                element.set((key, "padded"), non_tensor(self.pad_output))
        return self._returned(tensordict, restacked(elements, shape), _BESIDE)

    def _returned(self, tensordict: TensorDictBase, result: TensorDictBase, beside: Sequence[str]) -> TensorDictBase:
        """Return `out_keys` and the entries `beside` them, in the input or in a new tensordict."""
        if not self.inplace:
            return result.select(*self.out_keys, *beside, strict=False)
        if result is not tensordict:
            for key in (*self.out_keys, *beside):
                written = result.get(key, None)
                if written is not None:
                    tensordict.set(key, written)
        return tensordict

    def check_tools(self) -> None:
        """Raise RenderingError if conversations with tools cannot be rendered."""
        if self.renderer is not None and self.input_mode == "history":
            self.renderer.check_tools()

    async def take_turn(self, element: TensorDictBase, sampling: SamplingConfig | None = None) -> TensorDictBase:
        """Generate for one conversation (batch shape `[]`) and write the answer into it."""
        conversation = self.prepare(element)
        completion = await self.complete(conversation.prompt_ids, sampling or self.sampling)
        return self.write_turn(element, answered(conversation, completion), completion)

    async def complete(
        self,
        prompt_ids: list[int],
        sampling: SamplingConfig,
        *,
        request_id: str | None = None,
        routing_key: str | None = None,
        stream: TokenStream | None = None,
    ) -> Completion:
        """Return the engine's checked completion of `prompt_ids`; `stream` needs an engine that `StreamsTokens`.

        Raises ValueError if the prompt leaves no room for a token, and EngineError if the engine
        died, refused the request or returned an invalid completion.
        """
        engine = self.engine
        streamed = {} if stream is None else {"stream": stream}
        completion = await engine.generate(
            prompt_ids, sampling, request_id=request_id, routing_key=routing_key, **streamed
        )
        budget = completion_budget(len(prompt_ids), sampling, engine.max_model_len)
        vocab_size = engine.vocab_size
        if vocab_size is None and self.tokenizer is not None:
            vocab_size = _num_ids_of(self.tokenizer)
        check_completion(
            completion,
            budget=budget,
            vocab_size=vocab_size,
            needs_sampling_mask=sampling.needs_sampling_mask,
        )
        check_routed_experts(completion, len(prompt_ids))
        return completion

    def prepare(self, element: TensorDictBase) -> Conversation:
        """Return the conversation of `element` with its rendered prompt."""
        conversation = plain(element.get("conversation", None))
        if conversation is None:
            conversation = Conversation.start(
                self.renderer, mode=self.conversation_mode, fork_threshold_tokens=self.fork_threshold_tokens
            )
        prompt = element.get(self.input_key, None)
        if prompt is None:
            raise ValueError(
                f"Expected {self.input_key!r} key in the tensordict, which the policy reads, but the tensordict has "
                f"{sorted(map(str, element.keys(True)))}; reset an environment with input_mode={self.input_mode!r}."
            )
        if self.input_mode == "history":
            if not isinstance(prompt, History):
                raise TypeError(f"Expected History object at {self.input_key!r}, got {plain(prompt)!r:.80}.")
            return conversation.with_prompt(prompt.chats, tools=plain(element.get("tools", None)))
        if self.input_mode == "text":
            assert self.renderer is not None
            return conversation.with_prompt_ids(self.renderer.encode(plain(prompt)))
        if (is_real := element.get(self.attention_mask_key, None)) is not None:
            prompt = prompt[is_real.bool()]
        return conversation.with_prompt_ids(prompt.tolist())

    def write_turn(
        self, element: TensorDictBase, conversation: Conversation, completion: Completion, *, is_read: bool = True
    ) -> TensorDictBase:
        """Write an answered conversation into `element` (batch shape `[]`).

        `completion` is its last turn. `is_read` tells whether other code reads the turn's tensors,
        response and finish reason, which training rows do not need; otherwise they are not written.
        """
        element.set("conversation", non_tensor(conversation))
        if is_read or self.input_mode == "tokens":
            _write_tensors(element, conversation, self.log_probs_key if self.return_log_probs else None)
            element.set("finish_reason", non_tensor(completion.finish_reason))
        if self.input_mode == "history":
            prompt: History = element.get(self.input_key)
            assert conversation.last is not None
            message = conversation.last.message
            histories = {"prompt": prompt, "full": History.from_chats((*prompt.chats, message), check=False)}
            if is_read:
                histories["response"] = History.from_chats([message], check=False)
            element.set("history", container_of(ChatHistory, histories))
        elif self.input_mode == "text":
            assert self.renderer is not None
            text_prompt = plain(element.get(self.input_key))
            text_response = self.renderer.decode(completion.token_ids)
            element.set("text", Text(prompt=text_prompt, response=text_response, full=text_prompt + text_response))
        return element

    def write_text(self, element: TensorDictBase) -> None:
        """Write the text of a turn in history mode, decoded from its tokens, as TorchRL does."""
        if self.renderer is not None and self.input_mode == "history":
            prompt, response = (self.renderer.decode(element["tokens", key].tolist()) for key in _PARTS)
            element.set("text", Text(prompt=prompt, response=response, full=prompt + response))


def answered(conversation: Conversation, completion: Completion) -> Conversation:
    """Return the conversation with a completion of its prompt."""
    return conversation.with_completion(
        completion.token_ids,
        log_probs=completion.log_probs,
        versions=completion.versions,
        sampling_mask=completion.sampling_mask,
        routed_experts=completion.routed_experts,
    )


_BESIDE = ("policy_versions", SAMPLING_MASK_KEY, ROUTED_EXPERTS_KEY, "conversation", "finish_reason")
_PARTS = ("prompt", "response")
_TEMPLATES = ("renderer", "chat_template", "chat_template_name")
"""Arguments that choose a policy's template, one of which may be given."""


def _write_tensors(element: TensorDictBase, conversation: Conversation, log_probs_key: str | None) -> None:
    """Write the last turn's tensors as views of the conversation's."""
    assert conversation.node is not None
    split = conversation.num_tokens - conversation.node.num_completion_tokens
    token_ids = conversation.tensor_view("token_ids")
    log_probs = conversation.tensor_view("log_probs")
    loss_mask = conversation.tensor_view("loss_mask")
    versions = conversation.tensor_view("versions")
    tokens = {"prompt": token_ids[:split], "response": token_ids[split:], "full": token_ids}
    masks = {"all_attention_mask": torch.ones_like(loss_mask), "all_assistant_mask": loss_mask}
    element.set("tokens", container_of(Tokens, tokens))
    if log_probs_key is not None:
        element.set(log_probs_key, container_of(LogProbs, {"response": log_probs[split:], "full": log_probs}))
    element.set("masks", container_of(Masks, masks))
    element.set("policy_versions", tensordict_of({"full": versions}))
    replayed = sampling_mask_entry(conversation.sampling_mask) | routed_experts_entry(conversation.routed_experts)
    for key, entry in replayed.items():
        element.set(key, entry)


def _pad_turns(elements: Sequence[TensorDictBase], log_probs_key: str, token_id: int) -> None:
    """Pad the tensors of turns to one length, prompts on the left, responses on the right."""
    lengths = [[len(element["tokens", part]) for part in _PARTS] for element in elements]
    left, right = (max(column) for column in zip(*lengths, strict=True))
    fill = {"tokens": token_id, "policy_versions": CONTEXT_VERSION, "masks": 0, log_probs_key: 0}
    for element, (num_prompt, num_response) in zip(elements, lengths, strict=True):
        pads = {"prompt": (left - num_prompt, 0), "response": (0, right - num_response)}
        for container in fill.keys() & element.keys():
            for name, entry in list(element[container].items()):
                pad = pads.get(name, (left - num_prompt, right - num_response))
                padded = torch.nn.functional.pad(entry, pad, value=fill[container])
                element.set((container, name), padded)


def _num_ids_of(tokenizer: Tokenizer) -> int:
    """Return the number of a tokenizer's ids, of which some may be unused."""
    num_tokens = len(tokenizer)
    if _num_ids.get(tokenizer, (0, 0))[0] != num_tokens:  # reading the vocabulary takes tens of milliseconds
        _num_ids[tokenizer] = num_tokens, 1 + max(tokenizer.get_vocab().values())
    return _num_ids[tokenizer][1]
