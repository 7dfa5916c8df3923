"""The model as an agent sees it, and the result that the agent returns."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from llmrl._utils.failure import describe
from llmrl._utils.numbers import finite_number, location_of
from llmrl._utils.types import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentModel:
    """The address of the model for an agent; each is valid for one rollout."""

    base_url: str
    """With `/v1`, for the clients of OpenAI and of Anthropic alike."""
    api_key: str
    """Secret that identifies the rollout: a client that sends it acts as the rollout's agent."""
    name: str
    """Name of the model. `NAME:aside` is answered and not recorded: for titles, or summaries for a screen."""
    info: dict[str, object] = field(default_factory=dict)
    """Entries that an agent adds to the rollout's record."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that point programs to the model."""
        bare_url = self.base_url.removesuffix("/v1")
        # Requests to this machine must not go through the user's proxy.
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1,localhost")))
        return {
            "NO_PROXY": direct,
            "no_proxy": direct,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_MODEL": self.name,
            "ANTHROPIC_BASE_URL": bare_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
            "ANTHROPIC_MODEL": self.name,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": f"{self.name}:aside",
        }


class AgentTimeout(Exception):
    """Raised if an agent exceeds its time limit: its rollout is truncated."""


Score = float | Mapping[str, float] | None
"""A number, named parts that add up, or None: not scored."""
Play = Callable[[Row, AgentModel], Score | Awaitable[Score]]
"""An agent: a function of a row of the dataset and the model, which plays to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentScore:
    """The result of an agent's function."""

    reward: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    is_scored: bool = False
    error: str = ""
    """The reason why the returned value is not a score."""

    @classmethod
    def of(cls, returned: object, play: Play) -> AgentScore:
        """Read the returned value of a function.

        Example:
            >>> AgentScore.of({"right": 1.0, "short": 0.5}, print).reward
            1.5
        """
        if returned is None:
            return cls()
        try:
            if isinstance(returned, Mapping):
                parts = {str(name): finite_number(part, f"the score {name!r}") for name, part in returned.items()}
                return cls(reward=finite_number(sum(parts.values()), "the score"), parts=parts, is_scored=True)
            return cls(reward=finite_number(returned, "the score"), is_scored=True)
        except (TypeError, ValueError) as error:
            return cls(
                error=f"{describe(error)} Returned by {getattr(play, '__qualname__', play)} ({location_of(play)})."
            )
