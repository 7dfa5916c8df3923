"""Training an agent: a program that calls the policy at a URL, here with OpenAI's client, learns one-digit sums."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from llmrl import AgentEnv, AsyncVLLM, train
from llmrl.endpoint.agent import AgentModel
from llmrl.envs.tasks.addition import addition_problems, is_last_number_right


async def play(row: Mapping[str, str], model: AgentModel) -> float:
    # The connection is not encrypted; without reading certificates, a client is created faster.
    http = DefaultAsyncHttpxClient(verify=False)
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, http_client=http) as client:
        messages = [
            {"role": "system", "content": "You are a calculator. Reply with the number only."},
            {"role": "user", "content": row["query"]},
        ]
        answer = await client.chat.completions.create(model=model.name, messages=messages)
    [choice] = answer.choices
    return is_last_number_right(choice.message.content, row["answer"]) if choice.finish_reason == "stop" else 0.0


def main(engine: AsyncVLLM | None = None, *, num_steps: int = 1, groups_per_batch: int = 2, seed: int = 0) -> None:
    path = train(
        "embedded",
        AgentEnv(play, addition_problems("train"), repeats=8, shuffle=True, seed=seed),
        eval_envs={"sums": AgentEnv(play, addition_problems("test"), name="sums", repeats=4, seed=seed)},
        path=tempfile.mkdtemp(prefix="llmrl-agent-"),
        num_steps=num_steps,
        groups_per_batch=groups_per_batch,
        max_new_tokens=12,
        max_model_len=256,
        learning_rate=2e-5,
        seed=seed,
        engine=engine,
    )
    print(f"Look at the run: llmrl view {path}")


if __name__ == "__main__":
    main(num_steps=12, groups_per_batch=16)
