"""The recipe `calculator` played by an agent of the OpenAI Agents SDK, which asks the policy at a URL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llmrl import AgentEnv
from llmrl.endpoint.agent import AgentModel
from llmrl.envs.tasks.registry import load_function
from llmrl.rendering.tool_calls import make_tool_call
from llmrl.tools import ToolError

_CALCULATOR = Path(__file__).parent.with_name("calculator") / "task.py"
problems = load_function(_CALCULATOR, "problems")
calculate = load_function(_CALCULATOR, "calculate")
is_right = load_function(_CALCULATOR, "is_right")

PROMPT = "Call the calculator, then reply with the number only."
MAX_TURNS = 3
TOOL: dict[str, Any] = {
    "name": "calculate",
    "description": "Compute an expression of two numbers, such as 12 * 34.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
}


async def call(context: object, arguments: str) -> str:
    """Answer a call of the tool."""
    try:
        return calculate(**json.loads(arguments))
    except (ToolError, TypeError, ValueError) as error:
        return f"Error: {error}"


async def play(row: dict[str, Any], model: AgentModel) -> float:
    """Let the agent work on a product; return 1 for the number and nothing else."""
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
            instructions=PROMPT,
            tools=[tool],
            model=OpenAIChatCompletionsModel(model=model.name, openai_client=client),
        )
        try:
            settings = RunConfig(tracing_disabled=True)
            result = await Runner.run(agent, row["query"], max_turns=MAX_TURNS, run_config=settings)
        except AgentsException:  # too many turns, or a call of a tool that there is not
            return 0.0
    return is_right(str(result.final_output), row["answer"])


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> AgentEnv:
    """Make the environment."""
    return AgentEnv(play, problems(split), name=split, repeats=repeats, shuffle=True, seed=seed)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the first problems for training as conversations with a call, which `sft.jsonl` holds."""
    return [
        {
            "messages": [
                {"role": "system", "content": PROMPT},
                {"role": "user", "content": row["query"]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [make_tool_call("calculate", {"expression": row["expression"]})],
                },
                {"role": "tool", "content": row["answer"], "name": "calculate"},
                {"role": "assistant", "content": row["answer"]},
            ],
            "tools": [{"type": "function", "function": TOOL}],
        }
        for row in problems("train")[:count]
    ]
