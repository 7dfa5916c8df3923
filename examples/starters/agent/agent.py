"""An agent: your own program calls the policy at a URL, like a service, and its work is scored."""

from __future__ import annotations

from collections.abc import Mapping

from openai import AsyncOpenAI

from llmrl import AgentEnv
from llmrl.endpoint.agent import AgentModel


async def play(row: Mapping[str, str], model: AgentModel) -> float:
    """Work on one problem with any framework that speaks OpenAI's or Anthropic's API; return the score."""
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
        messages = [{"role": "user", "content": f"Which month has {row['days']} days? Name one."}]
        draft = await client.chat.completions.create(model=model.name, messages=messages)
        messages.append(draft.choices[0].message.model_dump(include={"role", "content"}))
        messages.append({"role": "user", "content": "Now the name of the month only."})
        final = await client.chat.completions.create(model=model.name, messages=messages)
    words = (final.choices[0].message.content or "").replace(".", " ").replace(",", " ").split()
    # The share of right words, so that a model that names the month among other words gets a signal.
    return any(word in row["months"].split() for word in words) / max(len(words), 1)


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> AgentEnv:
    """Return the environment; the agent works on each problem `repeats` times, and its scores are compared."""
    rows = [
        {"days": "28 or 29", "months": "February"},
        {"days": "30", "months": "April June September November"},
        {"days": "31", "months": "January March May July August October December"},
    ]
    return AgentEnv(play, rows, name=split, repeats=repeats, shuffle=True, seed=seed)
