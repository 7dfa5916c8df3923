"""The types of an agent: its model and its score."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from llmrl._utils.types import Row
from llmrl.endpoint.requests import ASIDE, RefusedRequest

MODEL_NAME = "policy"
"""Name of the model in an agent's requests."""


def model_name(role: str) -> str:
    """Return the name of a role's model.

    Example:
        >>> model_name(""), model_name("user")
        ('policy', 'policy:user')
    """
    return f"{MODEL_NAME}:{role}" if role else MODEL_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentModel:
    """Address of the model for an agent, valid for one rollout."""

    base_url: str
    """URL that ends in `/v1`, for clients of OpenAI and Anthropic."""
    api_key: str
    """Secret key of the rollout."""
    name: str
    """Name of the model; answers of `NAME:aside`, for titles or summaries, are not recorded."""
    info: dict[str, object] = field(default_factory=dict)
    """Entries that an agent adds to the rollout's record."""
    give_reward: Callable[[str, float, int], None] | None = field(default=None, repr=False)
    """Function that `reward` calls."""
    infos: Mapping[str, dict[str, object]] = field(default_factory=dict)
    """The `info` of each role's model, by the name for `role`."""

    @property
    def aside(self) -> AgentModel:
        """The same model for an untrained branch or sub-agent, such as a judge: nothing is recorded."""
        return replace(self, name=self.name.removesuffix(ASIDE) + ASIDE)

    def role(self, role: str) -> AgentModel:
        """Return the model of a role or policy. Raises ValueError if the `AgentEnv` has no such role."""
        if role not in self.infos:
            raise ValueError(f"role must be one of {list(self.infos)}, got {role!r}.")
        suffix = ASIDE if self.name.endswith(ASIDE) else ""
        return replace(self, name=model_name(role) + suffix, info=self.infos[role])

    def reward(self, reply_id: str, value: float, *, answer: int = 0) -> None:
        """Add a reward to an answer, in addition to the rollout's score.

        With `MCAdvantage(gamma=...)` the reward is credited to that answer and to the answers that led to it. A reward
        for the last answer of a branch or of a sub-agent is thus a reward for that branch or sub-agent.

        Args:
            reply_id: id of the reply, as the API returns it (`chatcmpl-…`, `resp_…`, `msg_…`).
            answer: index of the answer, if the request asked for several.

        Raises ValueError if no such answer is recorded, the value is not finite, or the model belongs to no rollout.
        """
        if self.give_reward is None:
            raise ValueError("this model belongs to no rollout, so its answers cannot have rewards.")
        try:
            self.give_reward(reply_id, value, answer)
        except RefusedRequest as refused:
            raise ValueError(refused.message) from None

    def environment(self) -> dict[str, str]:
        """Return environment variables with which programs find the model."""
        bare_url = self.base_url.removesuffix("/v1")
        # Requests to the endpoint must not go through the user's proxy.
        hosts = dict.fromkeys(("127.0.0.1", "localhost", urlsplit(self.base_url).hostname or "localhost"))
        direct = ",".join(filter(None, (os.environ.get("NO_PROXY"), *hosts)))
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
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.aside.name,
        }


class AgentTimeout(Exception):
    """Raised if an agent exceeds its time limit; its rollout is truncated."""


Score = float | Mapping[str, float] | None
"""A number, named parts that add up, or None for no score."""
Play = Callable[[Row, AgentModel], Score | Awaitable[Score]]
"""An agent: a function of a dataset row and the model that plays one rollout."""
