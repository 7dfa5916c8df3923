"""Functions on lists that combine two operations, judged by hidden tests; each problem has a known solution."""

from __future__ import annotations

from typing import Any

from llmrl.envs import CodeEnv
from llmrl.envs.tasks.code_problems import code_problems


def env(split: str = "train", repeats: int = 8, seed: int = 0) -> CodeEnv:
    """Return the environment; its problems are the same for every seed."""
    return CodeEnv(code_problems(split=split), split=split, repeats=repeats, shuffle=True, seed=seed)


def conversations(count: int) -> list[dict[str, Any]]:
    """Return the content of `sft.jsonl`: the first training problems with their solutions."""
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
