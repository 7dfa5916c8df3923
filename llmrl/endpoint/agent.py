"""The model as an agent sees it, and what the agent returns."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

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
