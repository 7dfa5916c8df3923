"""`Tau2Env`: conversations of tau2-bench between the policy, a simulated user and the tools of a domain."""

from __future__ import annotations

import asyncio
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Unpack

from llmrl._utils.arguments import check_positive
from llmrl._utils.failure import describe
from llmrl._utils.numbers import finite_number
from llmrl._utils.types import Row
from llmrl.data import StopReason
from llmrl.endpoint.agent import AgentModel, AgentTimeout
from llmrl.envs.agent import AgentEnv
from llmrl.envs.hubs.virtual_env import python_with
from llmrl.envs.hubs.worker_process import WorkerDied, WorkerError, Workers
from llmrl.envs.sampler import DrawOptions
from llmrl.rewards import Score

_CUT = ("max_steps", "timeout")
_FAILED = ("user_error", "infrastructure_error", "unexpected_error", "context_window_exceeded")


class Tau2Env(AgentEnv):
    """A domain of tau2-bench (Barres et al. 2025, arXiv 2506.07982), with simulated customers, tools and an evaluator.

    The policy plays tau2's agent, and another model behind a URL plays the customer. The orchestrator, agent, user and
    evaluator are those of an unmodified checkout of https://github.com/sierra-research/tau2-bench. They run in a worker
    process with its own virtual environment, which is created at the first use and kept. tau2 needs Python 3.12.

    The reward is tau2's, and the breakdown contains its factors. A conversation that reaches
    `max_steps` or the time limit is truncated, with reward 0, as in tau2. A conversation that
    fails, for example because of the customer's model, is an error.

    Args:
        domain: name of the domain, such as `airline`, `retail`, `telecom` or `mock`.
        folder: folder of the checkout.
        user: litellm's arguments for the customer's model: `model`, and options of its requests, such as `api_base`.
        task_ids: ids of the tasks to use; by default all tasks of the split.
        split: split of the domain's tasks; by default `base`, which is also used for `train` if there is no such split.
        max_steps: number of messages and calls after which a conversation is truncated.
        timeout_seconds: time limit of a conversation.
        open_seconds: time limit for the worker to start.
        host, port, public_url: see `AgentEnv`.
        **draws: see `DatasetChatEnv`.

    Raises:
        ValueError: if tau2 cannot be installed (`InstallError`), or refuses the domain, a split or a task.

    Example:
        >>> Tau2Env("mock", folder="nowhere", user={"model": "openai/qwen"})
        Traceback (most recent call last):
        ValueError: folder must be a checkout of tau2-bench, with data/tau2/domains, got 'nowhere'.
    """

    def __init__(
        self,
        domain: str,
        *,
        folder: str | Path,
        user: Mapping[str, object],
        task_ids: Sequence[str] = (),
        split: str | None = None,
        max_steps: int = 200,
        timeout_seconds: float = 600.0,
        open_seconds: float = 300.0,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        check_positive(max_steps=max_steps, timeout_seconds=timeout_seconds, open_seconds=open_seconds)
        checkout = Path(folder).expanduser().resolve()
        if not (checkout / "data" / "tau2" / "domains").is_dir():
            raise ValueError(f"folder must be a checkout of tau2-bench, with data/tau2/domains, got {str(folder)!r}.")
        if not isinstance(user.get("model"), str):
            raise ValueError(f"user must have the entry `model`, such as 'openai/qwen', got {sorted(user)}.")
        self.domain = domain
        self.timeout_seconds = timeout_seconds
        """Time limit of a conversation."""
        self.grace_seconds = 10.0
        """Time after the limit for tau2, which checks the limit between messages, to end the conversation itself."""
        opening = {
            "data": str(checkout / "data"),
            "domain": domain,
            "split": split,
            "task_ids": list(task_ids),
            "user": dict(user),
            "settings": {"max_steps": max_steps, "timeout": timeout_seconds},
        }
        version = tomllib.loads((checkout / "pyproject.toml").read_text())["project"].get("requires-python", "")
        python = functools.partial(python_with, (str(checkout),), version=version)
        self._workers = Workers(python, "tau2_worker.py", opening, open_seconds)
        try:
            rows = self._workers.current().opened["rows"]
        except (WorkerDied, WorkerError) as error:
            self._workers.close()
            raise ValueError(f"the domain {domain!r} cannot be played: {describe(error)}") from error
        draws.setdefault("name", split or "train")
        play = self.run_agent  # called by the collector itself, because it returns scores by role
        super().__init__(play, rows, host=host, port=port, public_url=public_url, **draws)  # type: ignore[arg-type]

    async def run_agent(self, row: Row, model: AgentModel) -> dict[str, Score]:
        """Play the conversation, and return tau2's reward."""
        request = {"task_id": row["task_id"], "url": model.base_url, "key": model.api_key, "model": model.name}
        try:
            async with asyncio.timeout(self.timeout_seconds + self.grace_seconds):
                played = await self._workers.ask("play", request)
        except TimeoutError:
            raise AgentTimeout(
                f"a conversation about {row['task_id']!r} took more than {self.timeout_seconds:g} s."
            ) from None
        ended = played["reason"]
        model.info.update({"stop_condition": ended, "info": played["info"]})
        if ended in _FAILED:
            raise WorkerError(f"tau2 ended the conversation about {row['task_id']!r} with {ended!r}.")
        reason = str(StopReason.ENVIRONMENT_TRUNCATED) if ended in _CUT else ""
        reward = finite_number(played["reward"], f"the reward of {row['task_id']!r}")
        return {"": Score(reward, played["breakdown"], reason=reason)}

    def close(self, **kwargs: object) -> None:
        """End the worker process."""
        super().close(**kwargs)
        self._workers.close()
