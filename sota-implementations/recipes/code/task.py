"""Functions of lists with two parts, judged by hidden tests; a right solution of each is known."""

from __future__ import annotations

from typing import Any

from llmrl.envs import CodeEnv
from llmrl.envs.tasks.code_problems import code_problems


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> CodeEnv:
    """Make the environment; its problems are the same for every seed."""
    return CodeEnv(code_problems(split=split), split=split, repeats=repeats, shuffle=True, seed=seed)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the first problems for training with their solutions, which `sft.jsonl` holds."""
    return [
        {
            "messages": [
                {"role": "system", "content": CodeEnv.task.system_prompt},
                {"role": "user", "content": row["query"]},
                {"role": "assistant", "content": row["solution"]},
            ]
        }
        for row in code_problems()[:count]
    ]
