"""`MessageEnv`: an environment defined by its messages, and the adapter that makes it a `ChatEnv`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, NonTensor

from llmrl._utils.asynchronous import run_sync
from llmrl._utils.background_loop import BackgroundLoop
from llmrl._utils.failure import describe, traceback_of
from llmrl._utils.numbers import finite_number, location_of
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl._utils.types import Row
from llmrl.data import ChatHistory, History, Message, check_messages
from llmrl.data.message import copied
from llmrl.data.tensordicts import batch_elements, container_of, non_tensor, plain, restacked, tensordict_of
from llmrl.envs.dataset import DatasetChatEnv
from llmrl.envs.sampler import Drawn, DrawOptions


@dataclass(frozen=True, slots=True)
class MessageStep:
    """An environment's response to an assistant message."""

    messages: Sequence[Message] = ()
    """New messages (user, tool or system); an assistant message raises ValueError."""
    reward: float = 0.0
    """Reward of this turn; the rewards of a rollout's turns are summed."""
    is_done: bool = False
    """Whether the conversation has ended by itself."""
    is_truncated: bool = False
    """Whether a limit of the environment ended the conversation; the policy does not answer the last messages."""
    info: Row = field(default_factory=dict)
    """Further data, stored as `("next", "env_info")`; a rollout's record has the last value of each name."""


class MessageEnv(ABC):
    """One conversation: `init` opens it, and `step` answers the assistant. Each conversation has its own instance.

    The three methods run in one event loop, shared by all conversations. An exception ends only its own conversation.

    Example:
        >>> class Riddle(MessageEnv):
        ...     async def init(self):
        ...         return [{"role": "user", "content": "What has keys and no locks?"}]
        ...     async def step(self, message):
        ...         return MessageStep(reward=float("piano" in message["content"]), is_done=True)
        >>> MessageChatEnv(lambda item: Riddle()).reset()["history"].prompt.role
        ['user']
    """

    _loop: BackgroundLoop | None = None
    """Event loop of the conversation; None after unpickling in another process."""

    @abstractmethod
    async def init(self) -> Sequence[Message]:
        """Return the opening messages, which may include assistant messages (few-shot examples)."""

    @abstractmethod
    async def step(self, message: Message) -> MessageStep:
        """Answer the assistant's message."""

    async def close(self) -> None:
        """Release the conversation's resources; called exactly once, also if `init` failed."""
        return None


@dataclass(slots=True, eq=False)
class Opened:
    """A conversation after `init`."""

    drawn: Drawn
    env: MessageEnv
    messages: Sequence[Message]


class MessageChatEnv(DatasetChatEnv):
    """A `ChatEnv` in which each conversation is a `MessageEnv`.

    Args:
        factory: function that builds the environment of one conversation from a dataset item.
        dataset: items, or a file of them, see `load_rows`; by default one empty item, which is repeated.
        **draws: `repeats`, `shuffle`, `seed`, `num_epochs` and `name`, see `DatasetChatEnv`.

    Example:
        >>> class Echo(MessageEnv):
        ...     async def init(self):
        ...         return [{"role": "user", "content": "Say hi."}]
        ...     async def step(self, message):
        ...         return MessageStep(reward=float("hi" in message["content"]), is_done=True)
        >>> MessageChatEnv(lambda item: Echo()).reset()["history"].prompt.content
        ['Say hi.']
    """

    writes_reward = True

    def __init__(
        self,
        factory: Callable[[Row], MessageEnv],
        dataset: str | Path | Iterable[Row] | None = None,
        *,
        device: torch.device | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        self._factory = factory
        self._loops = ReplaceableLoop("llmrl-message-envs")
        super().__init__(
            [{}] if dataset is None else dataset,
            prepare=lambda item: "",
            device=device,
            **draws,
        )

    def _make_specs(self, shape: torch.Size) -> None:
        super()._make_specs(shape)
        self.state_spec["message_env"] = NonTensor(shape=tuple(shape), example_data=None)
        observation_spec = self.observation_spec
        for key in ("env_error", "env_traceback"):
            observation_spec[key] = NonTensor(shape=tuple(shape), example_data="")
        observation_spec["env_info"] = NonTensor(shape=tuple(shape), example_data=None)
        self.observation_spec = Composite(observation_spec, shape=shape)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: object) -> TensorDictBase:
        if tensordict is not None and isinstance(opened := plain(tensordict.get("message_env", None)), Opened):
            return self._opened_step(opened)  # `before_reset` opened it
        return super()._reset(tensordict, **kwargs)

    async def before_reset(self, drawn: Drawn) -> TensorDictBase:
        """Open one conversation asynchronously, and return the tensordict to call `reset` with."""
        loop = self._home(drawn)
        message_env, messages = await self._loops.wait(self._init(drawn, loop), on=loop)
        return tensordict_of({"message_env": non_tensor(Opened(drawn, message_env, messages))})

    def _home(self, drawn: Drawn) -> BackgroundLoop:
        return self._loops.current

    def _made(self, drawn: Drawn) -> MessageEnv:
        return self._factory(copied(drawn[0]))

    async def _init(self, drawn: Drawn, loop: BackgroundLoop) -> tuple[MessageEnv, Sequence[Message]]:
        message_env = self._made(drawn)
        message_env._loop = loop
        try:
            return message_env, copied(check_messages(await message_env.init(), argument="messages from init"))
        except BaseException:
            await message_env.close()
            raise

    def _open_all(self, drawn: Sequence[Drawn | None]) -> list[TensorDictBase]:
        async def open_all() -> list[TensorDictBase | BaseException]:
            opening = (self.before_reset(one) for one in drawn if one is not None)
            return await asyncio.gather(*opening, return_exceptions=True)

        results = run_sync(open_all())
        failures = [result for result in results if isinstance(result, BaseException)]
        elements = [result for result in results if not isinstance(result, BaseException)]
        if failures:
            for element in elements:
                self.release(element)
            raise failures[0]
        opened = iter([plain(element.get("message_env")) for element in elements])
        return [self._placeholder() if one is None else self._opened_step(next(opened)) for one in drawn]

    def _placeholder(self) -> TensorDictBase:
        return _with_env(super()._placeholder(), None)

    def _opened_step(self, opened: Opened) -> TensorDictBase:
        return _with_env(self._opened(*opened.drawn, query=opened.messages), opened.env)

    async def before_step(self, element: TensorDictBase) -> None:
        """Answer one conversation asynchronously, before the batched step."""
        message_env = plain(element.get("message_env"))
        chat = element.get(("history", "full")).chats
        answer: object = MessageStep()
        if message_env is not None and chat:  # otherwise the action was drawn from the spec
            try:
                answer = await self._asked(message_env, chat[-1])
            except Exception as error:
                answer = error
        element.set("env_answer", non_tensor(answer))

    async def _asked(self, message_env: MessageEnv, message: Message) -> MessageStep:
        return await self._loops.wait(_answer(message_env, message), on=message_env._loop)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        elements = batch_elements(tensordict)
        waiting = [element for element in elements if "env_answer" not in element]

        async def answer_all() -> None:
            await asyncio.gather(*map(self.before_step, waiting))

        if waiting:
            run_sync(answer_all())
        return self._moved(restacked([self._stepped(element) for element in elements], tensordict.batch_size))

    def _stepped(self, tensordict: TensorDictBase) -> TensorDictBase:
        answer = plain(tensordict.pop("env_answer"))
        if isinstance(answer, BaseException):  # ends only this conversation of the batch
            written = dict(super()._stepped(tensordict).items())
            outcome = {"env_error": describe(answer), "env_traceback": traceback_of(answer), "env_info": None}
        else:
            written = self._written(tensordict, answer)
            outcome = {"env_error": "", "env_traceback": "", "env_info": answer.info or None}
        return tensordict_of({**written, **{key: non_tensor(value) for key, value in outcome.items()}})

    def _written(self, element: TensorDictBase, answer: MessageStep) -> dict[str, object]:
        is_cut = answer.is_truncated and not answer.is_done
        flags = {"terminated": answer.is_done, "truncated": is_cut, "done": answer.is_done or is_cut}
        prompt: History = self._full(element)
        if answer.messages:
            prompt = History.from_chats((*prompt.chats, *answer.messages), check=False)
        return {
            "history": container_of(ChatHistory, {"prompt": prompt}),
            "conversation": non_tensor(plain(element.get("conversation", None))),
            "reward": torch.full((1, 1), float(answer.reward)),
            **{key: torch.full((1,), bool(value)) for key, value in flags.items()},
        }

    def release(self, element: TensorDictBase) -> None:
        """Close the environment of a finished conversation; raise the exception of its `close`, if any."""
        message_env = plain(element.get("message_env", None))
        if isinstance(message_env, Opened):
            message_env = message_env.env
        if message_env is not None and type(message_env).close is not MessageEnv.close:
            (message_env._loop or self._loops.current).run(message_env.close())

    def close(self, **kwargs: object) -> None:
        """Stop the event loop of the conversations' environments."""
        super().close(**kwargs)
        self._loops.close()


def _with_env(step: TensorDictBase, message_env: MessageEnv | None) -> TensorDictBase:
    entries = {"message_env": message_env, "env_error": "", "env_traceback": "", "env_info": None}
    return step.update({key: non_tensor(value) for key, value in entries.items()})


async def _answer(message_env: MessageEnv, message: Message) -> MessageStep:
    answer = await message_env.step(copied(message))
    if not isinstance(answer, MessageStep):
        raise TypeError(f"step must return a MessageStep, got {type(answer).__name__}.")
    try:
        finite_number(answer.reward, "MessageStep.reward")
    except (TypeError, ValueError) as error:
        step = type(message_env).step
        raise type(error)(f"{error} Returned by {step.__qualname__} ({location_of(step)}).") from None
    messages = copied(check_messages(answer.messages))
    if any(message["role"] == "assistant" for message in messages):
        raise ValueError("step returned an assistant message; only the policy speaks as the assistant.")
    return replace(answer, messages=messages, info=copied(dict(answer.info)))
