"""`GymnasiumTextEnv`: a text-based `gymnasium.Env` as a conversation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from llmrl.data import Message, text_of
from llmrl.envs.message_env import MessageEnv, MessageStep

if TYPE_CHECKING:
    import gymnasium


class GymnasiumTextEnv(MessageEnv):
    """A `gymnasium.Env` with strings as observations and actions, for `MessageChatEnv`; it runs in a thread.

    Observations are user messages, and the policy's answers are actions. Environments of GEM (`gem.make`) work, too.

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

    def __init__(
        self, env: gymnasium.Env[str, str], *, seed: int | None = None, system_prompt: str | None = None
    ) -> None:
        self.env = env
        self.seed = seed
        self.system_prompt = system_prompt

    async def init(self) -> list[Message]:
        """Return the first observation."""
        observation, _ = await asyncio.to_thread(self.env.reset, seed=self.seed)
        opening: list[Message] = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        return [*opening, self._message(observation)]

    async def step(self, message: Message) -> MessageStep:
        """Take the message's text as the action; the final observation is discarded."""
        action = text_of(message.get("content"))
        observation, reward, is_terminated, is_truncated, info = await asyncio.to_thread(self.env.step, action)
        messages = [] if is_terminated else [self._message(observation)]
        return MessageStep(
            messages, float(reward), is_done=bool(is_terminated), is_truncated=bool(is_truncated), info=info or {}
        )

    async def close(self) -> None:
        """Close the environment."""
        if hasattr(self.env, "close"):  # GEM's environments have no `close`
            await asyncio.to_thread(self.env.close)

    def _message(self, observation: object) -> Message:
        if not isinstance(observation, str):
            raise TypeError(
                f"observations must be strings, got {type(observation).__name__}; wrap the environment in a "
                "gymnasium.ObservationWrapper that describes them."
            )
        return {"role": "user", "content": observation}
