"""The task of the recipe `calculator` for an agent of the OpenAI Agents SDK, which calls the policy at a URL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from llmrl import AgentEnv
from llmrl.endpoint.agent import AgentModel
from llmrl.envs.tasks.registry import load_function
from llmrl.tools import ToolError

_CALCULATOR = Path(__file__).parent.with_name("calculator") / "task.py"
calculator = sys.modules[load_function(_CALCULATOR, "problems").__module__]

MAX_TURNS = 3
TOOL: dict[str, Any] = {
    "name": "calculate",
    "description": calculator.calculate.__doc__,
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


async def call(context: object, arguments: str) -> str:
    """Return the answer to a tool call."""
    try:
        return calculator.calculate(**json.loads(arguments))
    except (ToolError, TypeError, ValueError) as error:
        return f"Error: {error}"


async def play(row: dict[str, Any], model: AgentModel) -> float:
    """Let the agent answer a question, and return 1 if its last answer is only the right number."""
    from agents import Agent, AgentsException, FunctionTool, OpenAIChatCompletionsModel, RunConfig, Runner
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, timeout=600) as client:
        tool = FunctionTool(
            name=TOOL["name"],
            description=TOOL["description"],
            params_json_schema=TOOL["parameters"],
            on_invoke_tool=call,
            strict_json_schema=False,
        )
        agent = Agent(
            name="Calculator",
            instructions=calculator.PROMPT,
            tools=[tool],
            model=OpenAIChatCompletionsModel(model=model.name, openai_client=client),
        )
        try:
            settings = RunConfig(tracing_disabled=True)
            result = await Runner.run(agent, row["query"], max_turns=MAX_TURNS, run_config=settings)
        except AgentsException:  # too many turns, or a call of an unknown tool
            return 0.0
    return calculator.is_right(str(result.final_output), row["answer"])


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> AgentEnv:
    """Return the environment."""
    return AgentEnv(play, calculator.problems(split), name=split, repeats=repeats, shuffle=True, seed=seed)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the content of `sft.jsonl`: the conversations of `calculator`, with the tool schema that the SDK sends."""
    tools = [{"type": "function", "function": TOOL}]
    return [{**one, "tools": tools} for one in calculator.conversations(count)]
