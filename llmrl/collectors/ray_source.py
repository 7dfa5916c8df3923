"""Rollouts played by collector actors on a Ray cluster; the books stay with the trainer."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from llmrl.collectors.base import dataset_env_of
from llmrl.collectors.player import RolloutLimits, RolloutPlayer
from llmrl.collectors.rows import rollout_rows
from llmrl.collectors.scheduler import Job
from llmrl.collectors.source import EnvSource
from llmrl.collectors.stepper import EnvStepper
from llmrl.data import Rollout
from llmrl.envs import PromptSampler
from llmrl.policies import LLMWrapperBase

logger = logging.getLogger("llmrl")


class CollectorActor:
    """Plays groups where it stands: an environment and a policy of its own, one group a call, many calls at once.

    It draws nothing by itself: each call says which places of the dataset to play. What it returns holds no view of
    anything bigger: rows are cloned to their own size, conversations stay here.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        policy_factory: Callable[[], LLMWrapperBase],
        limits: RolloutLimits,
        step_timeout_seconds: float | None,
    ) -> None:
        stepper = EnvStepper(env_factory(), timeout_seconds=step_timeout_seconds)
        dataset_env = dataset_env_of(stepper.env)
        assert dataset_env is not None  # the trainer's side has checked
        player = RolloutPlayer(stepper, policy_factory(), limits=limits)
        self._source = EnvSource(stepper, player, dataset_env.prompts, is_grouped=True)
        self._drawing = asyncio.Lock()

    async def play(self, positions: list[int]) -> list[Rollout]:
        """Play the rollouts at these places of the dataset, a group, to their ends."""
        prompts = self._source.prompts
        assert prompts is not None
        async with self._drawing:
            prompts.load_state_dict({"position": 0, "again": positions})
            jobs = await self._source.open_rollouts(len(positions))
        played = await asyncio.gather(*map(self._source.play, jobs))
        rollouts = [rollout for rollouts in played for rollout in rollouts]
        await self._source.score_group(rollouts)
        for rollout in rollouts:
            rollout.rows = [row.clone() for row in rollout_rows(rollout)]
            rollout.conversation = None  # it holds the renderer; its tokens are in the rows
            rollout.columns = {}
        return rollouts

    async def process_id(self) -> int:
        """Of the actor's process."""
        return os.getpid()


class RaySource:
    """Hands groups to collector actors, the least loaded first; a dead actor's groups are played again elsewhere.

    Args:
        actor_options: of each actor: `num_cpus`, `num_gpus`, `resources`, ...
        num_collectors: actors.
        actor_arguments: what each is built with.
        prompts: the dataset, as every actor has it; drawn from here alone.
        max_concurrent_rollouts: over all actors.
        num_retries: how often a group is played again after its actor died.

    Raises:
        ray.exceptions.RayActorError: when an actor cannot be built.
    """

    def __init__(
        self,
        *,
        actor_options: Mapping[str, Any],
        num_collectors: int,
        actor_arguments: tuple[Any, ...],
        prompts: PromptSampler,
        max_concurrent_rollouts: int,
        num_retries: int,
    ) -> None:
        import ray

        self.prompts, self.group_size, self._num_retries = prompts, prompts.num_samples, num_retries
        self._arguments = actor_arguments
        self._options = {"max_concurrency": max_concurrent_rollouts + 2, **actor_options}
        self._class = ray.remote(CollectorActor)
        self.actors = [self._start() for _ in range(num_collectors)]
        """Handles, by place; a dead one is replaced."""
        ray.get([actor.process_id.remote() for actor in self.actors])  # an author's mistake in a factory is raised here
        self._loads = [0] * num_collectors
        self.num_restarts = 0
        """Actors that died and were replaced."""
        self.version = 0
        """The policy's version, as far as it was told."""

    def _start(self) -> Any:
        return self._class.options(**self._options).remote(*self._arguments)

    @property
    def policy_version(self) -> int:
        """The version that the last update gave."""
        return self.version

    async def open(self, num_groups: int) -> list[list[Job]]:
        """Draw the next groups; each is one job, so that it costs one call."""
        groups = []
        for _ in range(num_groups):
            positions = self.prompts.upcoming(self.group_size)
            if len(positions) < self.group_size:
                break
            records = []
            for _ in positions:
                _, group_id, sample_index = self.prompts.draw()
                records.append(
                    Rollout(
                        rollout_id=f"{group_id}/{sample_index}",
                        group_id=group_id,
                        sample_index=sample_index,
                        group_size=self.group_size,
                    )
                )
            groups.append([Job(records=records, payload=positions, positions=tuple(positions))])
        return groups

    async def play(self, job: Job) -> list[Rollout]:
        """Play a group on the least loaded actor.

        Raises:
            ray.exceptions.RayActorError: when actors died under it more often than `num_retries`.
        """
        from ray.exceptions import RayActorError

        for attempt in itertools.count():
            place = min(range(len(self.actors)), key=lambda place: (self._loads[place], place))
            actor = self.actors[place]
            self._loads[place] += 1
            try:
                return await actor.play.remote(job.payload)
            except RayActorError as error:
                if attempt == self._num_retries:
                    raise
                if self.actors[place] is actor:
                    logger.warning("collector actor %d died (%s); another takes its place", place, error)
                    self.actors[place] = self._start()
                    self.num_restarts += 1
            finally:
                self._loads[place] -= 1
        raise AssertionError("the loop above ends by itself")

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Actors score their groups themselves."""

    def shutdown(self) -> None:
        """End the actors."""
        import ray

        for actor in self.actors:
            ray.kill(actor)
