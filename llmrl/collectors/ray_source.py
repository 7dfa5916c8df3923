"""Rollouts played by collector actors on a Ray cluster; the books stay with the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchrl.envs import EnvBase, TransformedEnv

from llmrl._utils.garbage import search_rarely
from llmrl._utils.imports import require
from llmrl.collectors.rollout_runner import RolloutLimits
from llmrl.collectors.rows import portable_turn, rollout_row_bytes
from llmrl.collectors.scheduler import RolloutTask
from llmrl.collectors.source import EnvSource, drawn_record
from llmrl.data import Rollout
from llmrl.engines.ray.cluster import connect
from llmrl.envs.primer import dataset_env_of
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PolicyVersion, find_rubric_rewards

logger = logging.getLogger("llmrl")

MAX_IN_FLIGHT = 1 << 16
"""Calls that an actor works on at once."""

_NUM_RETRIES = 3
"""How often a group is played again after its actor died, and an actor that did not start is started again."""


class CollectorActor:
    """Plays groups where it stands: an environment and a policy of its own, one group a call, many calls at once.

    It draws nothing by itself: each call says which places of the dataset to play. What it returns holds no view of
    anything bigger: rows are packed, turns cloned to their own size, conversations stay here.
    """

    def __init__(
        self,
        make_env: Callable[[], EnvBase],
        make_policy: Callable[[], LLMWrapperBase],
        in_groups: bool,
        track_version: bool,
        limits: RolloutLimits,
    ) -> None:
        env = make_env()
        policy = make_policy()
        if track_version:
            env = TransformedEnv(env, PolicyVersion(source=lambda: policy.engine.policy_version))
        self._in_groups = in_groups
        self._source = EnvSource(env, policy, in_groups=in_groups, limits=limits)

    async def play(self, positions: list[int]) -> list[Rollout]:
        """Play the rollouts at these places of the dataset, a group, to their ends."""
        jobs = await self._source.open_at(positions)
        played = await asyncio.gather(*map(self._source.play, jobs))
        rollouts = [rollout for rollouts in played for rollout in rollouts]
        await self._source.score_group(rollouts)
        for rollout in rollouts:
            if self._in_groups:
                rollout.row_bytes = rollout_row_bytes(rollout)
            rollout.steps = [portable_turn(step) for step in rollout.steps]
            rollout.conversation = None  # it holds the renderer; its tokens are in the packed rows
            rollout.columns = {}  # the trainer has them
            rollout.tool_states = {}
        return rollouts

    async def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayActors:
    """Collector actors on a Ray cluster, each with an environment of its own."""

    make_env: Callable[[], EnvBase]
    """Builds an environment with a dataset; called here once, and in every actor."""
    number: int
    options: Mapping[str, object]
    """Options of each actor: `num_cpus`, `num_gpus`, `resources`, ..."""
    engine: object
    """Engine to send weights to; None if this process cannot reach it."""
    ray_init_config: Mapping[str, object] | None


@dataclass(slots=True)
class _ActorSlot:
    """Where groups are played: an actor, and the one after it when it dies."""

    actor: Any
    load: int = 0
    is_ready: bool = False
    num_failed_starts: int = 0


class RaySource:
    """Hands groups to collector actors, the least loaded first; a dead actor's groups are played again elsewhere.

    A dead actor is replaced at once. Until its successor runs, which may be never where a node is gone for good, the
    others play.

    Args:
        actors: actors that play.
        make_policy: builds an actor's policy.
        in_groups: whether to play groups, as training rows; else one by one, as turns.
        track_version: whether turns get a `"policy_version"`.
        limits: limits that end a rollout early.

    Raises:
        ValueError: if the environment has no dataset, or if an argument cannot reach the actors.
        ray.exceptions.RayActorError: when an actor cannot be built.
    """

    def __init__(
        self,
        actors: RayActors,
        make_policy: Callable[[], LLMWrapperBase],
        *,
        in_groups: bool,
        track_version: bool | PolicyVersion,
        limits: RolloutLimits | Mapping[str, RolloutLimits],
    ) -> None:
        if isinstance(limits, Mapping):
            raise ValueError("limits by name are those of a MixedEnv, which is collected in one process.")
        if isinstance(track_version, PolicyVersion):
            raise ValueError("a PolicyVersion of yours does not reach the actors: pass track_policy_version=True.")
        connect(actors.ray_init_config)
        ray = require("ray", extra="ray")
        own_env = actors.make_env()
        dataset_env = dataset_env_of(own_env)
        if dataset_env is None:
            raise ValueError("env must build one DatasetChatEnv: actors play prompts of it by their positions.")
        self.dataset_env = dataset_env
        is_group_scored = any(reward.rubric.is_group_scored for reward in find_rubric_rewards(own_env))
        self.is_open = asyncio.Event()
        self.engine = actors.engine
        self._prompts = self.dataset_env.prompts
        self.num_players = len(getattr(self.dataset_env, "roles", ("",)))
        self._are_groups_whole = is_group_scored or self.num_players > 1
        self.group_size = self._prompts.num_samples if in_groups or self._are_groups_whole else 1
        self._arguments = (actors.make_env, make_policy, in_groups, track_version, limits)
        self._options = {"max_concurrency": MAX_IN_FLIGHT, **actors.options}
        self._class = ray.remote(CollectorActor)
        self.num_restarts = 0
        """Actors that died and were replaced."""
        self.version = 0
        """The policy's version, as far as it was told."""
        self._changed = asyncio.Event()
        self._starting: set[asyncio.Task[None]] = set()
        self._slots = [_ActorSlot(self._new_actor()) for _ in range(actors.number)]
        ray.get([slot.actor.process_id.remote() for slot in self._slots])  # an author's mistake is raised here
        for slot in self._slots:
            slot.is_ready = True
        self._search_as_before = search_rarely(self)

    def _new_actor(self) -> Any:
        return self._class.options(**self._options).remote(*self._arguments)

    @property
    def actors(self) -> list[Any]:
        """Handles, by place; a dead one is replaced."""
        return [slot.actor for slot in self._slots]

    @property
    def policy_version(self) -> int:
        """The version that the last update gave."""
        return self.version

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Draw the next groups; each is one job, so that it costs one call. Fewer where the data ends."""
        if self.group_size > 1:
            self._prompts.skip_to_group()
        jobs = await self.open_rollouts(num_groups * self.group_size)
        return [[job] for job in jobs if len(job.records) == self.group_size]

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw so many rollouts, in jobs of a group each; fewer where the data ends."""
        if self._are_groups_whole:
            self._prompts.skip_to_group()
        positions = self._prompts.upcoming(count)
        jobs = []
        for start in range(0, len(positions), self.group_size):
            chosen = positions[start : start + self.group_size]
            records = [drawn_record(self.dataset_env, self._prompts.draw()) for _ in chosen]
            jobs.append(RolloutTask(records=records, payload=chosen, positions=tuple(chosen)))
        return jobs

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play a group on the least loaded actor.

        Raises:
            ray.exceptions.RayError: if actors died under it four times.
        """
        from ray.exceptions import RayActorError, RayError, RayTaskError

        for attempt in itertools.count():
            slot = await self._choose()
            actor = slot.actor
            slot.load += 1
            try:
                rollouts: list[Rollout] = await actor.play.remote(job.payload)
                columns = {record.rollout_id: record.columns for record in job.records}
                for rollout in rollouts:
                    rollout.columns = columns.get(rollout.rollout_id, {})
                return rollouts
            except RayTaskError:
                raise
            except RayError as error:  # the actor died, or its node with the answer on it
                if isinstance(error, RayActorError) and slot.actor is actor:
                    self._replace(slot, error)
                if attempt == _NUM_RETRIES:
                    raise
            finally:
                slot.load -= 1
        raise AssertionError("the loop above ends by itself")

    async def _choose(self) -> _ActorSlot:
        while True:
            ready = [slot for slot in self._slots if slot.is_ready]
            if ready:
                return min(ready, key=lambda slot: slot.load)
            if not self._starting:
                raise RuntimeError("no collector actor runs, and none could be started; its own log says why.")
            self._changed.clear()
            await self._changed.wait()

    def _replace(self, slot: _ActorSlot, error: Exception) -> None:
        logger.warning("a collector actor died (%s); another takes its place", error)
        with contextlib.suppress(Exception):  # where it is only out of reach, it must not go on
            require("ray", extra="ray").kill(slot.actor)
        slot.actor = self._new_actor()
        slot.is_ready = False
        self.num_restarts += 1
        task = asyncio.create_task(self._wait_until_ready(slot))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        task.add_done_callback(lambda _: self._changed.set())

    async def _wait_until_ready(self, slot: _ActorSlot) -> None:
        from ray.exceptions import RayError

        try:
            await slot.actor.process_id.remote()
        except RayError as error:
            slot.num_failed_starts += 1
            if slot.num_failed_starts <= _NUM_RETRIES:
                self._replace(slot, error)
        else:
            slot.is_ready = True
            slot.num_failed_starts = 0

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Do nothing: actors score their groups themselves."""

    def shutdown(self) -> None:
        """End the actors; Ray goes on."""
        self._search_as_before()
        ray = require("ray", extra="ray")
        for slot in self._slots:
            ray.kill(slot.actor)
