"""Products of two numbers from 11 to 99, which a small model solves only by calling the calculator."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Sequence
from typing import Any

from torchrl.envs import Compose

from llmrl import DatasetChatEnv, RewardFn, Rubric, RubricReward
from llmrl.data import Message
from llmrl.rendering.tool_calls import make_tool_call
from llmrl.tools import ToolError
from llmrl.transforms import ToolTransform

PROMPT = "Call the calculator, then reply with the number only."
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPRESSION = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


def calculate(expression: str) -> str:
    """Compute an expression of two numbers, such as 12 * 34."""
    found = _EXPRESSION.fullmatch(expression)
    if found is None:
        raise ToolError("The expression must be two numbers with +, - or * between them.")
    return str(_OPERATIONS[found[2]](int(found[1]), int(found[3])))


def problems(split: str) -> list[dict[str, Any]]:
    """Return the products: 400 for training, or 50 others that are held out."""
    pairs = random.Random(0).sample([(a, b) for a in range(11, 100) for b in range(11, 100)], 450)
    chosen = pairs[:400] if split == "train" else pairs[400:]
    return [{"query": f"What is {a} * {b}?", "expression": f"{a} * {b}", "answer": str(a * b)} for a, b in chosen]


def is_right(completion: str, answer: str) -> float:
    """Return 1 if the last answer is only the right number."""
    return float(completion.strip().rstrip(".") == answer)


def has_called(messages: Sequence[Message]) -> float:
    """Return 1 if the calculator returned a number; a metric with weight 0 in the reward."""
    return float(any(message["role"] == "tool" and str(message["content"]).isdigit() for message in messages))


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> DatasetChatEnv:
    """Return the environment."""
    asked = DatasetChatEnv(problems(split), name=split, repeats=repeats, shuffle=True, seed=seed, system_prompt=PROMPT)
    rubric = Rubric(RewardFn(is_right), RewardFn(has_called, weight=0), truncation_reward=0.0)
    return asked.append_transform(Compose(ToolTransform([calculate]), RubricReward(rubric)))


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the content of `sft.jsonl`: the first training problems as conversations with a call."""
    tools = list(env().reset()["tools"])
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
            "tools": tools,
        }
        for row in problems("train")[:count]
    ]
