"""`GymnasiumTextEnv` and `GymnasiumEnv`: environments of gymnasium as conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Unpack

from llmrl._utils.arguments import check_least
from llmrl._utils.failure import describe
from llmrl._utils.imports import require
from llmrl._utils.types import Row
from llmrl.data.message import Message, system_messages, text_of
from llmrl.envs.hubs.gymnasium_spaces import NoAction, about, action_of, action_words, drawn, observation_text
from llmrl.envs.message_env import MessageChatEnv, MessageEnv, MessageStep
from llmrl.envs.sampler import DrawOptions
from llmrl.envs.tasks.task import Split, first_seed

if TYPE_CHECKING:
    import gymnasium


class GymnasiumTextEnv(MessageEnv):
    """A `gymnasium.Env` as a conversation, for `MessageChatEnv`; it runs in a thread.

    Observations become user messages: strings unchanged, other values as JSON, below the rendered
    picture if the environment was made with `render_mode="ansi"`. The policy's answers are parsed
    as actions (`action_of`); an invalid answer costs a turn and is answered with a description of
    the actions. Environments of GEM (`gem.make`), which have no spaces and take strings, also work.

    Example:
        >>> class Echo:
        ...     def reset(self, seed=None):
        ...         return "Say hi.", {}
        ...     def step(self, action):
        ...         return "bye", float(action == "hi"), True, False, {}
        ...     def close(self):
        ...         pass
        >>> from llmrl.envs import MessageChatEnv
        >>> MessageChatEnv(lambda item: GymnasiumTextEnv(Echo())).reset()["history"].prompt.content
        ['Say hi.']
    """

    def __init__(self, env: gymnasium.Env, *, seed: int | None = None, system_prompt: str | None = None) -> None:
        self.env = env
        self.seed = seed
        self.system_prompt = system_prompt
        self._actions = getattr(env, "action_space", None)

    async def init(self) -> list[Message]:
        """Return the first observation."""
        return [*system_messages(self.system_prompt or None), await asyncio.to_thread(self._reset)]

    async def step(self, message: Message) -> MessageStep:
        """Apply the action in the message's text; the observation of a terminated episode is discarded."""
        return await asyncio.to_thread(self._step, text_of(message.get("content")))

    async def close(self) -> None:
        """Close the environment."""
        if hasattr(self.env, "close"):  # GEM's environments have no `close`
            await asyncio.to_thread(self.env.close)

    def _reset(self) -> Message:
        observation, _ = self.env.reset(seed=self.seed)
        return self._message(observation)

    def _step(self, text: str) -> MessageStep:
        try:
            action = text if self._actions is None else action_of(self._actions, text)
        except NoAction as error:
            return MessageStep([{"role": "user", "content": str(error)}])
        observation, reward, is_terminated, is_truncated, info = self.env.step(action)
        messages = [] if is_terminated else [self._message(observation)]
        return MessageStep(
            messages, float(reward), is_done=bool(is_terminated), is_truncated=bool(is_truncated), info=info or {}
        )

    def _message(self, observation: object) -> Message:
        picture = drawn(self.env)
        text = observation_text(observation)
        return {"role": "user", "content": f"{picture}\n\n{text}" if picture else text}


class GymnasiumEnv(MessageChatEnv):
    """A registered environment of gymnasium, played in text; see `GymnasiumTextEnv`.

    The default system prompt consists of the sections of the environment's documentation about its
    task, actions, observations and rewards, and a description of an action. The reward is the sum
    of the environment's rewards. The environment's own time limit truncates the rollout.

    Args:
        env_id: id for `gymnasium.make`, such as `FrozenLake-v1`, or `MODULE:ID` with a module to import first.
        num_problems: number of seeds per epoch.
        split: `train` or `test`, which use different seeds.
        system_prompt: system prompt in place of the documentation.
        options: keyword arguments of the environment, passed to `gymnasium.make`.
        **draws: see `DatasetChatEnv`.

    Raises:
        MissingExtraError: if gymnasium is not installed.
        ValueError: if gymnasium cannot make the environment.
        TypeError: if the observations have too many numbers to be written as text.

    Example:
        >>> env = GymnasiumEnv("FrozenLake-v1", options={"is_slippery": False})
        >>> print(env.reset()["history"].prompt.content[1])
        [S]FFF
        FHFH
        FFFH
        HFFG
        <BLANKLINE>
        0
    """

    def __init__(
        self,
        env_id: str,
        *,
        num_problems: int = 1000,
        split: Split = "train",
        system_prompt: str | None = None,
        options: Mapping[str, object] | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        check_least(1, num_problems=num_problems)
        first = first_seed(split)
        self._options = dict(options or {})
        self._env_id = env_id
        env = self._make()
        if "render_mode" not in self._options and "ansi" in env.metadata.get("render_modes", ()):
            self._options["render_mode"] = "ansi"
        observation_text(env.reset(seed=first)[0])  # raises TypeError early
        if system_prompt is None:
            system_prompt = f"{about(env)}\n\nYour answer is your action: {action_words(env.action_space)}.".strip()
        self._system_prompt = system_prompt
        env.close()
        rows = [{"seed": first + number} for number in range(num_problems)]
        draws.setdefault("name", split)
        super().__init__(self._conversation, rows, **draws)

    def _make(self) -> gymnasium.Env:
        gymnasium = require("gymnasium", extra="envs")
        try:
            return gymnasium.make(self._env_id, **self._options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ValueError(
                f"gymnasium cannot make {self._env_id!r} with {self._options}: {describe(error)}"
            ) from error

    def _conversation(self, row: Row) -> GymnasiumTextEnv:
        return GymnasiumTextEnv(self._make(), seed=row["seed"], system_prompt=self._system_prompt)
