"""Player of `worker_program.py` for conversations of tau2-bench.

`Tau2Env` starts it in a virtual environment without llmrl, so this file imports only the standard library, tau2 and
tau2's dependencies. tau2's orchestrator, agent, user and evaluator are unmodified.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

Fields = dict[str, Any]
"""An object of JSON."""

_BASE = "base"
_MAX_CONVERSATIONS = 256


class Player:
    """The tasks of a domain, and conversations about them."""

    def __init__(self, domain: str, split: str | None, task_ids: list[str], user: Fields, settings: Fields) -> None:
        from tau2.runner import get_tasks
        from tau2.runner.helpers import load_task_splits

        splits = load_task_splits(domain) or {_BASE: []}
        if split == "train" and "train" not in splits:
            split = _BASE  # then all tasks are for training
        if split is not None and split not in splits:
            raise ValueError(f"the domain {domain!r} has no split {split!r}, only {', '.join(splits)}.")
        self.domain = domain
        self.tasks = {task.id: task for task in get_tasks(domain, split or _BASE, task_ids or None)}
        self._user = user
        self._settings = settings
        self._threads = ThreadPoolExecutor(_MAX_CONVERSATIONS, "conversations")

    async def play(self, task_id: str, url: str, key: str, model: str) -> Fields:
        """Play one conversation and evaluate it. The thread of a cancelled one runs until its next request fails."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._play, task_id, url, key, model)

    def _play(self, task_id: str, url: str, key: str, model: str) -> Fields:
        from tau2.data_model.simulation import TextRunConfig
        from tau2.runner import build_text_orchestrator, run_simulation

        user = dict(self._user)
        config = TextRunConfig(
            domain=self.domain,
            llm_agent=f"openai/{model}",
            # No retries, because a repeated request would get a second answer of the policy.
            llm_args_agent={"api_base": url, "api_key": key, "num_retries": 0, "max_retries": 0},
            llm_user=user.pop("model"),
            llm_args_user=user,
            **self._settings,
        )
        run = run_simulation(build_text_orchestrator(config, self.tasks[task_id]))
        judged = run.reward_info
        return {
            "reward": judged.reward,
            "breakdown": {str(name.value): value for name, value in (judged.reward_breakdown or {}).items()},
            "reason": str(run.termination_reason.value),
            "info": judged.info or {},
        }


async def open_player(
    stack: contextlib.AsyncExitStack, data: str, **arguments: Any
) -> tuple[Fields, dict[str, Callable[..., Awaitable[object]]]]:
    """Read the tasks; called by `worker_program.py`."""
    os.environ["TAU2_DATA_DIR"] = data
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise litellm's import downloads prices
    from loguru import logger

    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    player = Player(**arguments)
    rows = [{"task_id": name, "scenario": str(task.user_scenario)} for name, task in player.tasks.items()]
    return {"rows": rows}, {"play": player.play}
