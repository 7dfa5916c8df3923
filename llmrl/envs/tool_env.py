"""`ToolEnv`: the public methods of a class as the model's tools, like TRL's `environment_factory`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Unpack

from tensordict import TensorDictBase
from torchrl.envs import TransformedEnv

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.types import Row
from llmrl.data import Message
from llmrl.data.message import copied, system_messages, text_of
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep, Opened
from llmrl.envs.sampler import DrawOptions
from llmrl.envs.sources import load_rows
from llmrl.rewards import RewardFn, Rubric
from llmrl.tools import InstanceTools, ToolSession, ToolTransform
from llmrl.tools.session import set_session
from llmrl.tools.tool import call
from llmrl.transforms import RubricReward


class ToolEnv(KnownArguments, TransformedEnv):
    """Conversations with an object; its public methods are the tools, like TRL's `environment_factory`.

    Each conversation has its own instance. `reset` is called first, with the columns of the row that it has
    parameters for; the text that it returns, if any, is appended to the last user message. `get_reward` returns the
    rollout's reward at the end. Alternatively a rubric scores the rollout; its functions read the instance by the
    class name in snake case (`word_game` for `class WordGame`). `close` is always called. All methods may be `async`.

    Args:
        factory: the class, or a `functools.partial` of it.
        dataset: the rows, see `DatasetChatEnv`; the column `prompt` or `query` is a text or
            messages. Without a dataset, `reset` returns the first message.
        rubric: rubric that scores in place of `get_reward`.
        timeout: time limit of a tool call, and of `get_reward`, in seconds.
        **draws: see `MessageChatEnv`.

    Raises:
        TypeError: if the factory is not a class, or if a method is not a valid tool.
        ValueError: if the rows have no prompt, or if there is neither `get_reward` nor a rubric.

    Example:
        >>> class Counter:
        ...     def reset(self, start):
        ...         self.number = start
        ...         return f" The counter is at {start}."
        ...     def add(self, amount: int) -> str:
        ...         '''Add to the counter.'''
        ...         self.number += amount
        ...         return f"The counter is at {self.number}."
        ...     def get_reward(self):
        ...         return float(self.number == 7)
        >>> env = ToolEnv(Counter, [{"prompt": "Count to 7.", "start": 4}], repeats=2)
        >>> env.reset()["history"].prompt.content
        ['Count to 7. The counter is at 4.']
    """

    def __init__(
        self,
        factory: Callable[[], object],
        dataset: str | Path | Iterable[Row] | None = None,
        *,
        rubric: Rubric | None = None,
        system_prompt: str | None = None,
        timeout: float = 30.0,
        **draws: Unpack[DrawOptions],
    ) -> None:
        cls = factory.func if isinstance(factory, functools.partial) else factory
        if not isinstance(cls, type):
            raise TypeError(f"factory must be a class, or a functools.partial of one, got {factory!r:.80}.")
        rows = [{"prompt": []}] if dataset is None else load_rows(dataset)
        column = next((column for column in ("prompt", "query") if column in rows[0]), None)
        if column is None:
            raise ValueError(f"the rows have neither 'prompt' nor 'query', only {sorted(rows[0])}.")
        instances = InstanceTools(cls, factory)
        if rubric is None:
            if not hasattr(cls, "get_reward"):
                raise ValueError(f"{cls.__name__} has no get_reward: give it one, or pass a rubric.")
            rubric = Rubric(RewardFn(_OwnReward(instances.state_name), name="get_reward"), timeout_seconds=timeout)
        chat_env = _OpenedByTools(lambda row: _Opening(instances, row, column, system_prompt), rows, **draws)
        tools = ToolTransform(instances.tools, timeout=timeout)
        tools._home = chat_env._loops.current  # the event loop of their instances
        super().__init__(chat_env.append_transform(tools), RubricReward(rubric))


class _Opening(MessageEnv):
    """Creates the instance of a conversation and its first messages; tools answer later messages."""

    def __init__(self, instances: InstanceTools, row: Row, column: str, system_prompt: str | None) -> None:
        self._instances = instances
        self._row = row
        self._column = column
        self._system_prompt = system_prompt
        self.session = ToolSession()

    async def init(self) -> Sequence[Message]:
        prompt = self._row[self._column]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        messages = [*system_messages(self._system_prompt), *prompt]
        instance, said = await self._instances.open(self.session.id, copied(self._row))
        self.session.states[self._instances.state_name] = instance
        if said is None and messages:
            return messages
        if not isinstance(said, str):
            wanted = "a text or None" if messages else "a text where there is no prompt"
            raise TypeError(f"reset must return {wanted}, got {type(said).__name__}.")
        last = max((index for index, one in enumerate(messages) if one["role"] == "user"), default=None)
        if last is None:
            return [*messages, {"role": "user", "content": said}]
        messages[last] = {**messages[last], "content": text_of(messages[last].get("content")) + said}
        return messages

    async def step(self, message: Message) -> MessageStep:
        return MessageStep()

    async def close(self) -> None:
        self._instances.release(self.session.id)  # for tools that were never used; releasing twice is allowed


class _OpenedByTools(MessageChatEnv):
    """Adds a conversation's instance to the session of its tools."""

    def _opened_step(self, opened: Opened) -> TensorDictBase:
        step = super()._opened_step(opened)
        assert isinstance(opened.env, _Opening)
        set_session(step, opened.env.session)
        return step


class _OwnReward:
    """A reward function that calls `get_reward` of a conversation's instance."""

    def __init__(self, state_name: str) -> None:
        self._state_name = state_name
        self.__signature__ = inspect.Signature([inspect.Parameter(state_name, inspect.Parameter.KEYWORD_ONLY)])

    async def __call__(self, **given: Any) -> Any:
        return await call(given[self._state_name].get_reward, {})
