"""`VerifiersEnv`: an unmodified environment of the verifiers library, in its own process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import torch

from llmrl._utils.arguments import check_positive
from llmrl._utils.failure import describe
from llmrl._utils.numbers import finite_number
from llmrl._utils.types import Row
from llmrl.data import StopReason
from llmrl.endpoint.agent import AgentModel, AgentTimeout
from llmrl.envs.agent import AgentEnv
from llmrl.envs.hubs.virtual_env import python_with
from llmrl.envs.hubs.worker_process import Answer, WorkerDied, WorkerError, Workers
from llmrl.envs.sampler import DrawOptions
from llmrl.envs.sources import StreamedRows
from llmrl.rewards import Score

_VERIFIERS = "verifiers>=0.4,<0.5"
_ROWS_PER_REQUEST = 256


class VerifiersEnv(AgentEnv):
    """An unmodified environment of the verifiers library (https://github.com/PrimeIntellect-ai/verifiers).

    Its package runs in a worker process with its own virtual environment, which is created at the first use and kept.
    The tasks are the dataset, and their fields are its columns. An episode sends requests to the
    policy at the endpoint of a collector (`AgentEnv`). The reward is the sum of the weighted
    rewards, which are in the breakdown with the metrics. The rollout's `info` contains the
    episode's `info`, state and stop condition. An error of verifiers makes the rollout an error.

    The policy plays every seat for which the configuration names no `model` or `client`. If it plays several, each is a
    rollout with a role, as in `GameEnv`, and `repeats` counts rollouts. The policy also plays the seats that the
    environment does not train, which are not recorded. A seat without a harness runs in the worker, with messages and
    the environment's tools, but without a shell or a container; name a harness in `config` if it needs them.

    The package runs with the permissions of this process. A worker that dies is replaced, and its rollouts are errors.

    Args:
        taskset: id of the taskset, as for `vf-eval`.
        requirements: lines of a `requirements.txt`, such as the package's name, or its folder
            (`./my_env`). verifiers itself is always installed.
        config: configuration of the environment, as in the section `[env]` of verifiers' files:
            `taskset`, seats, judges.
        select: selection of tasks in the format of verifiers' `select`, such as `{"include": {"idx": ["0:100"]}}`.
        split: value of the taskset's own field `split` or `dataset_split`; a taskset without one
            has only `train`. Also the prefix of group ids, unless `name` is given.
        timeout_seconds: time limit of an episode, which truncates its rollouts.
        open_seconds: time limit for the worker to start and to load the package.
        host, port, public_url: see `AgentEnv`.
        **draws: see `DatasetChatEnv`. Infinite tasksets cannot be shuffled.

    Raises:
        ValueError: if the packages cannot be installed (`InstallError`), verifiers refuses the taskset or its
            configuration, the policy trains no seat, or `repeats` is not a multiple of the number of trained seats.

    Example:
        >>> VerifiersEnv("reverse-text", requirements="./reverse_text")
        Traceback (most recent call last):
        TypeError: requirements must be lines in a list, got './reverse_text'.
    """

    def __init__(
        self,
        taskset: str,
        *,
        requirements: Sequence[str] = (),
        config: Mapping[str, object] | None = None,
        select: Mapping[str, object] | None = None,
        split: str | None = None,
        timeout_seconds: float = 600.0,
        open_seconds: float = 300.0,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        device: torch.device | None = None,
        **draws: Unpack[DrawOptions],
    ) -> None:
        if isinstance(requirements, str):
            raise TypeError(f"requirements must be lines in a list, got {requirements!r}.")
        check_positive(timeout_seconds=timeout_seconds)
        self.taskset = taskset
        opening = {"taskset": taskset, "config": dict(config or {}), "select": dict(select or {}), "split": split}
        python = functools.partial(python_with, (_VERIFIERS, "uv", *requirements))
        self._workers = Workers(python, "verifiers_worker.py", opening, open_seconds)
        draws.setdefault("name", split or "train")
        self.timeout_seconds = timeout_seconds
        """Time limit of an episode."""
        rows = _Rows(self._workers)
        try:
            opened = self._workers.current().opened
            dataset: Iterable[Row]
            if opened["is_infinite"]:
                dataset = StreamedRows(rows)
                dataset.read(1)
            else:
                dataset = [row for part in rows for row in part]
        except (WorkerDied, WorkerError, TimeoutError) as error:
            self._workers.close()
            raise ValueError(f"the taskset {taskset!r} cannot be played: {describe(error)}") from error
        seats = tuple(name for name, is_trained in opened["seats"].items() if is_trained)
        if not seats:
            raise ValueError(
                f"the policy trains no seat of {taskset!r}: the environment does not train {sorted(opened['seats'])}, "
                "or config gives them a model or client."
            )
        self._seats = seats
        super().__init__(
            self.run_agent,  # type: ignore[arg-type]  # returns scores by role
            dataset,
            host=host,
            port=port,
            public_url=public_url,
            roles=seats if len(seats) > 1 else ("",),
            device=device,
            **draws,
        )

    async def run_agent(self, row: Row, model: AgentModel) -> dict[str, Score]:
        """Play the episode, and return the score of each seat."""
        models = {seat: model.role(role) if role else model for seat, role in zip(self._seats, self.roles, strict=True)}
        try:
            async with asyncio.timeout(self.timeout_seconds):
                episode = await self._episode(row, model, {seat: one.name for seat, one in models.items()})
        except TimeoutError:
            raise AgentTimeout(f"an episode of {self.taskset!r} took more than {self.timeout_seconds:g} s.") from None
        for error in (*episode["errors"], *(error for trace in episode["traces"] for error in trace["errors"])):
            if any(trace["is_timeout"] for trace in episode["traces"]):
                raise AgentTimeout(error["message"])
            failure = WorkerError(f"{error['type']}: {error['message']}")
            failure.add_note(error["traceback"])
            raise failure
        seats = zip(self._seats, self.roles, strict=True)
        return {role: self._scored(episode, seat, models[seat]) for seat, role in seats}

    async def _episode(self, row: Row, model: AgentModel, names: Mapping[str, str]) -> Answer:
        url = f"{model.base_url.removesuffix('/v1')}/s/{model.api_key}/v1"
        return await self._workers.ask("play", {"row": row, "url": url, "model": model.name, "names": names})

    def _scored(self, episode: Answer, seat: str, model: AgentModel) -> Score:
        traces = [trace for trace in episode["traces"] if trace["seat"] == seat]
        if len(traces) > 1:
            raise ValueError(
                f"the seat {seat!r} played {len(traces)} conversations in one episode, but a rollout is one "
                "conversation with one reward: configure the environment to play one."
            )
        if not traces:
            return Score(0.0, is_scored=False)
        [trace] = traces
        reason = str(StopReason.ENVIRONMENT_TRUNCATED) if trace["is_truncated"] else ""
        rewards, metrics = trace["rewards"], trace["metrics"]
        finite = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        model.info.update(trace["info"])
        if odd := {name: value for name, value in metrics.items() if name not in finite}:
            model.info["metrics"] = odd
        if not rewards or None in rewards.values():
            return Score(0.0, finite, is_scored=False, reason=reason)
        try:
            parts = {name: finite_number(value, f"the reward {name!r}") for name, value in rewards.items()}
            return Score(finite_number(sum(parts.values()), "the reward"), {**finite, **parts}, reason=reason)
        except (TypeError, ValueError) as error:
            error_text = f"{describe(error)} Returned by {self.taskset!r}."
            return Score(0.0, finite, is_scored=False, error=error_text, reason=reason)

    def close(self, **kwargs: object) -> None:
        """End the worker process."""
        super().close(**kwargs)
        self._workers.close()


class _Rows:
    """Iterator over the tasks, in lists of rows."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._place = 0
        self._has_ended = False

    def __iter__(self) -> _Rows:
        return self

    def __next__(self) -> list[Row]:
        if self._has_ended:
            raise StopIteration
        request = self._workers.current().ask("rows", {"start": self._place, "count": _ROWS_PER_REQUEST})
        part = request.result(self._workers.open_seconds)
        self._place += len(part["rows"])
        self._has_ended = part["has_ended"]
        return part["rows"]
