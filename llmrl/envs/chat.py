"""`ChatEnv`: the environment of a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data import Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import InputMode, Tokenizer
from llmrl.data import ChatHistory, History, Message, Text, Tokens, check_messages
from llmrl.data.chats import flatten
from llmrl.data.template_limit import written_in_time
from llmrl.data.tensordicts import container_of, non_tensor, plain, tensordict_of
from llmrl.transforms import IncrementalTokenizer, environment_parts

WRITTEN_BY_POLICIES = (
    "history", "text", "tokens", "log_probs", "masks", "policy_versions", "sampling_mask", "routed_experts",
    "finish_reason",
)  # fmt: skip
"""Entries of a turn that a policy writes; they are removed before the next turn unless a step wrote them."""
_TURNS: dict[InputMode, type[ChatHistory | Text | Tokens]] = {"history": ChatHistory, "text": Text, "tokens": Tokens}


class ChatEnv(KnownArguments, EnvBase):
    """A conversation: reset opens it with a query, and each step appends the policy's answer.

    Rewards and done flags come from transforms, which read `("history", "full")` and may append messages to
    `("next", "history", "prompt")`. The environment is stateless, so one instance serves any number of conversations.

    Args:
        input_mode: what the policy reads: `history` (messages; exact multi-turn tokens), `text` or `tokens`.
        batch_size: a fixed batch shape; by default `reset` and `step` accept any.
        system_prompt: first message of every conversation, unless the query has a system message.
        data_key: entry of the reset tensordict with the query: a string, messages, or token ids in `tokens` mode.
        tokenizer: renders a query's messages with its chat template in the modes `text` and
            `tokens`; without it, the query must already be text or token ids.
        template_kwargs: further arguments of the chat template.
        with_tokenizer: whether to return the environment with an appended `IncrementalTokenizer`,
            which needs `tokenizer`.

    Raises:
        ValueError: if `input_mode` is unknown, if `with_tokenizer` has no `tokenizer`, if
            `system_prompt` has no effect, or if reset gets no query, or one that needs `tokenizer`.

    Example:
        >>> from tensordict import TensorDict
        >>> env = ChatEnv(system_prompt="Reply with the number only.")
        >>> env.reset(TensorDict({"query": "7 + 8 ="})).get(("history", "prompt")).content
        ['Reply with the number only.', '7 + 8 =']
    """

    data_key = "query"
    dataset_class: ClassVar[type[ChatEnv]]
    """`DatasetChatEnv`; it is set there to avoid a circular import."""

    def __new__(cls, *args: object, with_tokenizer: bool = False, **kwargs: object) -> Self:
        """Return the environment, with an appended `IncrementalTokenizer` if `with_tokenizer`."""
        if not with_tokenizer:
            return super().__new__(cls, *args, **kwargs)
        tokenizer = kwargs.get("tokenizer")
        if tokenizer is None:
            raise ValueError("with_tokenizer=True appends an IncrementalTokenizer, which needs tokenizer=.")
        env = cls(*args, **kwargs)  # type: ignore[arg-type]
        # The result is not an instance of this class, so Python does not call `__init__` on it.
        return TransformedEnv(env, IncrementalTokenizer(tokenizer))  # type: ignore[arg-type]

    def __init__(
        self,
        *,
        input_mode: InputMode = "history",
        batch_size: Sequence[int] | int | None = None,
        system_prompt: str | None = None,
        tokenizer: Tokenizer | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        data_key: str | None = None,
        system_role: str = "system",
        user_role: str = "user",
        device: torch.device | None = None,
        with_tokenizer: bool = False,
    ) -> None:
        if input_mode not in _TURNS:
            raise ValueError(f"input_mode must be 'history', 'text' or 'tokens', got {input_mode!r}.")
        if input_mode != "history" and tokenizer is None and system_prompt is not None:
            raise ValueError(
                f"system_prompt has no effect with input_mode={input_mode!r} unless a template writes it: pass "
                "tokenizer=."
            )
        if isinstance(batch_size, int):
            batch_size = [batch_size]
        shape = torch.Size(batch_size or ())
        super().__init__(batch_size=shape, device=device, allow_done_after_reset=True)
        self._batch_locked = batch_size is not None
        self.input_mode = input_mode
        self.system_prompt = system_prompt
        self.tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self.system_role = system_role
        self.user_role = user_role
        if data_key is not None:
            self.data_key = data_key
        self._make_specs(shape)

    @classmethod
    def with_tokenizer(cls, tokenizer: Tokenizer, **kwargs: object) -> TransformedEnv:
        """Return an environment of this class with an appended `IncrementalTokenizer`."""
        return cls(tokenizer=tokenizer, with_tokenizer=True, **kwargs)  # type: ignore[arg-type]

    @classmethod
    def from_dataloader(cls, dataloader: Iterable[object], *, repeats: int = 1, **kwargs: object) -> EnvBase:
        """Return a `DatasetChatEnv` over the rows of a data loader."""
        return ChatEnv.dataset_class.from_dataloader(dataloader, repeats=repeats, **kwargs)

    def _make_specs(self, shape: torch.Size) -> None:
        container = self.input_mode
        turn = _TURNS[container]
        state = NonTensor(shape=tuple(shape), example_data=None)
        self.observation_spec = Composite(
            {container: turn.default_spec(shape, ("prompt",)), "conversation": state}, shape=shape
        )
        # A state entry, so that transformed environments pass the query to reset.
        self.state_spec = Composite({self.data_key: NonTensor(shape=tuple(shape), example_data="")}, shape=shape)
        self.action_spec = Composite({container: turn.default_spec(shape, ("full",))}, shape=shape)
        # One number per turn or per token: without a fixed size, `ParallelEnv` does not allocate shared memory for it.
        self.reward_spec = Unbounded((*shape, -1, 1), dtype=torch.float32)
        flag = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        self.full_done_spec = Composite(done=flag, terminated=flag.clone(), truncated=flag.clone(), shape=shape)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is None or tensordict.get(self.data_key, None) is None:
            raise ValueError(
                f"ChatEnv.reset needs a tensordict with {self.data_key!r} (the query); got "
                f"{None if tensordict is None else sorted(map(str, tensordict.keys()))}. "
                "For queries from a dataset use DatasetChatEnv."
            )
        return self._moved(self._open(tensordict, tensordict.batch_size))

    def _moved(self, written: TensorDictBase) -> TensorDictBase:
        return written if self.device is None else written.to(self.device)

    def _open(self, tensordict: TensorDictBase, shape: torch.Size) -> TensorDictBase:
        """Return the first prompts for the queries of a tensordict of batch shape `shape`."""
        if shape:
            elements = [self._open(element, element.batch_size) for element in tensordict.unbind(0)]
            return lazy_stack(elements, 0)
        turn = self._turn(self._first_prompt(plain(tensordict.get(self.data_key))))
        # An automatic reset keeps entries that are not written, so the token state of the last conversation is cleared.
        return tensordict_of({self.input_mode: turn, "conversation": non_tensor(None), **_flags(False)})

    def _turn(self, prompt: object) -> ChatHistory | Text | Tokens:
        """Return the container of a turn with its prompt: a history, a text or token ids."""
        if self.input_mode == "text":
            prompt = non_tensor(plain(prompt))
        return container_of(_TURNS[self.input_mode], {"prompt": prompt})

    def _first_prompt(self, query: object) -> object:
        if self.input_mode == "history":
            return History.from_chats(self.opening_messages(query))
        if self.input_mode == "text":
            if self.tokenizer is not None:
                return self._opening(self.tokenizer, query)
            if not isinstance(query, str):
                raise self._needs_tokenizer("text", query)
            return query
        if self.tokenizer is not None and not isinstance(query, torch.Tensor):
            query = self.tokenizer.encode(self._opening(self.tokenizer, query), add_special_tokens=False)
        try:
            return torch.as_tensor(query, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._needs_tokenizer("token ids", query) from error

    def _needs_tokenizer(self, wanted: str, query: object) -> ValueError:
        return ValueError(
            f"input_mode={self.input_mode!r} needs tokenizer=, which renders {self.data_key!r}, or {wanted} there; got "
            f"{query!r:.80}."
        )

    def _opening(self, tokenizer: Tokenizer, query: object) -> str:
        messages = [dict(message) for message in self.opening_messages(query)]
        options = {"add_generation_prompt": True, "tokenize": False, **self._template_kwargs}
        return written_in_time(partial(tokenizer.apply_chat_template, messages, **options))  # type: ignore[arg-type]

    def opening_messages(self, query: object) -> tuple[Message, ...]:
        """Return the messages that open a conversation: the system prompt, then the query.

        `query` is a string, a message, a list of messages, or a `History` of one conversation;
        TypeError and ValueError are raised otherwise.
        """
        if isinstance(query, str):
            messages: tuple[Message, ...] = ({"role": self.user_role, "content": query},)
        elif isinstance(query, History):
            [messages] = flatten(query.chats)
        elif isinstance(query, Mapping):
            messages = check_messages([query], argument=self.data_key)
        else:
            messages = check_messages(query, argument=self.data_key)
        if self.system_prompt is not None and not (messages and messages[0]["role"] == self.system_role):
            messages = ({"role": self.system_role, "content": self.system_prompt}, *messages)
        return messages

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._moved(self._stepped(tensordict))

    def _stepped(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_size:
            return lazy_stack([self._stepped(element) for element in tensordict.unbind(0)], 0)
        turn = self._turn(self._full(tensordict))
        conversation = non_tensor(plain(tensordict.get("conversation", None)))
        return tensordict_of(
            {self.input_mode: turn, "conversation": conversation, "reward": torch.zeros(1, 1), **_flags(False)}
        )

    def _full(self, element: TensorDictBase) -> Any:
        """Return the `full` entry of a turn, or its prompt and response concatenated."""
        turn = element.get(self.input_mode, {})
        full = turn.get("full", None)
        if full is not None:
            return full
        prompt, response = (turn.get(key, None) for key in ("prompt", "response"))
        if prompt is None or response is None:
            raise ValueError(
                f"step needs {(self.input_mode, 'full')}, which a policy writes, or prompt and response; got entries "
                f"{sorted(map(str, element.keys(True)))}."
            )
        if self.input_mode == "history":
            return prompt.extend(response, inplace=False)
        if self.input_mode == "text":
            return plain(prompt) + plain(response)
        return torch.cat([prompt, torch.as_tensor(plain(response), dtype=torch.int64)])

    def answered_messages(self, element: TensorDictBase) -> tuple[Message, ...]:
        """Return the opening messages and the policy's last answer of a `text` or `tokens` conversation after a step.

        Special tokens at the end of the answer are removed. Turns between the opening and the last
        answer are omitted. ValueError is raised if there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(f"rewards of input_mode={self.input_mode!r} need tokenizer=, which reads the answer.")
        prompt = plain(element.get((self.input_mode, "prompt")))
        answer = plain(element.get((self.input_mode, "response"), None))
        if answer is None:
            answer = plain(self._full(element))[len(prompt) :]
        if self.input_mode == "tokens":
            special = self.tokenizer.all_special_ids
            token_ids = torch.as_tensor(answer).tolist()
            while token_ids and token_ids[-1] in special:
                token_ids.pop()
            answer = self.tokenizer.decode(token_ids)
        else:
            marks = "|".join(map(re.escape, self.tokenizer.all_special_tokens))
            answer = re.sub(rf"(?:{marks})+\Z", "", answer)
        opening = self.opening_messages(plain(element.get(self.data_key)))
        return (*opening, {"role": "assistant", "content": answer})

    def _post_step_mdp_hooks(
        self, tensordict: TensorDictBase, tensordict_: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Remove the policy's outputs from its next input."""
        following = tensordict.get("next")
        for key in WRITTEN_BY_POLICIES:
            written = following.get(key, None)
            if written is not None:
                tensordict_.set(key, written.copy())
            elif tensordict_.get(key, None) is not None:
                tensordict_.pop(key)
        return tensordict, tensordict_

    def release(self, element: TensorDictBase) -> None:
        """Release the resources of a conversation; a collector calls this exactly once per conversation."""

    def _set_seed(self, seed: int | None) -> None:
        # A ChatEnv draws no random numbers.
        return None


def unlock_batch_size(env: EnvBase) -> None:
    """Let a `ChatEnv` accept batches of any shape; raise ValueError for other environments with a fixed batch size."""
    if not env.batch_locked:
        return
    chat_env = environment_parts(env)[0]
    if not isinstance(chat_env, ChatEnv):
        raise ValueError(
            f"env has the fixed batch size {tuple(env.batch_size)}; a collector plays any number of conversations: "
            "build the environment without batch_size."
        )
    chat_env._batch_locked = False
    for specs in ("_input_spec", "_output_spec"):  # specs of the old batch size cannot be set to None
        chat_env.__dict__[specs] = Composite(device=chat_env.device)
    chat_env.batch_size = torch.Size()
    chat_env._make_specs(chat_env.batch_size)
    env.empty_cache()


def _flags(value: bool) -> dict[str, torch.Tensor]:
    return {key: torch.full((1,), value) for key in ("done", "terminated", "truncated")}
