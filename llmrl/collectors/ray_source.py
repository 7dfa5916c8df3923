"""Rollouts played by actors on a Ray cluster; this process keeps track of the groups."""

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
from llmrl.collectors.source import EnvSource, drawn_record, roles_of
from llmrl.data import Rollout
from llmrl.engines.ray.cluster import connect
from llmrl.envs.primer import dataset_env_of
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PolicyVersion, find_rubric_rewards

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT = 1 << 16
"""Maximum number of concurrent calls per actor."""

_NUM_RETRIES = 3
"""Maximum number of retries: of a group after the death of its actor, and of an actor's start."""


class CollectorActor:
    """Actor that plays one group per call, many calls at once, with its own environment and policy.

    Each call says which positions of the dataset to play. The results share no memory with larger
    objects: rows are packed, turns are cloned to their own size, and conversations are left out.
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
        if track_version:
            env = TransformedEnv(env, PolicyVersion(source=lambda: policy.engine.policy_version))
        self._in_groups = in_groups
        self._source = EnvSource(env, in_groups=in_groups, limits=limits)
        policy = make_policy()
        self._source.use_policy(policy)

    async def play(self, positions: list[int]) -> list[Rollout]:
        """Play the rollouts of a group at these positions of the dataset to their ends."""
        jobs = await self._source.open_at(positions)
        rollouts = list(itertools.chain(*await asyncio.gather(*map(self._source.play, jobs))))
        await self._source.score_group(rollouts)
        for rollout in rollouts:
            if self._in_groups:
                rollout.row_bytes = rollout_row_bytes(rollout)
            rollout.steps = [portable_turn(step) for step in rollout.steps]
            rollout.conversation = None  # it holds the renderer; its tokens are in the rows or turns
            rollout.columns = {}  # the trainer's process has them
            rollout.tool_states = {}
        return rollouts

    async def process_id(self) -> int:
        """Return the id of the actor's process."""
        return os.getpid()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayActors:
    """Specification of the collector actors on a Ray cluster."""

    make_env: Callable[[], EnvBase]
    """Function that builds an environment with a dataset; called here once, and in every actor."""
    number: int
    options: Mapping[str, object]
    """Ray options of each actor, such as `num_cpus`, `num_gpus` and `resources`."""
    engine: object
    """Engine to send weights to; None if this process cannot reach it."""
    ray_init_config: Mapping[str, object] | None


@dataclass(slots=True)
class _ActorSlot:
    """State of one actor, or of its successor if it died."""

    actor: Any
    load: int = 0
    is_ready: bool = False
    num_failed_starts: int = 0


class RaySource:
    """Source that sends each group to the least loaded collector actor.

    A dead actor is replaced at once, and its groups are played again. Until its successor is ready,
    the other actors play. Actors return training rows with `in_groups`, otherwise turns.

    Raises ValueError if the environment has no dataset, or if an argument cannot be sent to the actors.
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
            raise ValueError("limits by name are those of a MixedEnv, which actors do not play: pass RolloutLimits.")
        if isinstance(track_version, PolicyVersion):
            raise ValueError("your own PolicyVersion is not sent to the actors: pass track_policy_version=True.")
        self._ray = require("ray", extra="ray")
        own_env = actors.make_env()
        dataset_env = dataset_env_of(own_env)
        if dataset_env is None:
            raise ValueError("env must build a single DatasetChatEnv, since actors draw its prompts by position.")
        self.dataset_env = dataset_env
        is_group_scored = any(reward.rubric.is_group_scored for reward in find_rubric_rewards(own_env))
        self.default_size = max(1, own_env.batch_size.numel())
        """Number of turns or last steps per batch unless another is given."""
        self.is_open = asyncio.Event()
        self.engine = actors.engine
        self._prompts = dataset_env.prompts
        self.num_players = len(roles_of(self.dataset_env))
        self._are_groups_whole = is_group_scored or self.num_players > 1
        self.group_size = self._prompts.num_samples if in_groups or self._are_groups_whole else 1
        self._arguments = (actors.make_env, make_policy, in_groups, track_version, limits)
        self._options = {"max_concurrency": MAX_IN_FLIGHT, **actors.options}
        self._actors = actors
        self._slots: list[_ActorSlot] = []
        self.num_restarts = 0
        """Number of actors that died and were replaced."""
        self.policy_version = 0
        """Version after the last update."""
        self._changed = asyncio.Event()
        self._starting: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the actors; raise RayActorError if one cannot be built."""
        self._search_as_before = search_rarely(self)
        connect(self._actors.ray_init_config)
        self._class = self._ray.remote(CollectorActor)
        self._slots = [_ActorSlot(self._new_actor()) for _ in range(self._actors.number)]
        self._ray.get([slot.actor.process_id.remote() for slot in self._slots])  # raises errors of the user's functions
        for slot in self._slots:
            slot.is_ready = True

    def _new_actor(self) -> Any:
        return self._class.options(**self._options).remote(*self._arguments)

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors in order; a dead actor is replaced."""
        return [slot.actor for slot in self._slots]

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Draw the next groups, each as one job of an actor; fewer if the data ends."""
        if self.group_size > 1:
            self._prompts.skip_to_group()
        jobs = await self.open_rollouts(num_groups * self.group_size)
        return [[job] for job in jobs if len(job.records) == self.group_size]

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw `count` rollouts in jobs of one group each; fewer if the data ends."""
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
        """Play a group on the least loaded actor; raise `RayError` if four attempts fail."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        for attempt in itertools.count():
            slot = await self._choose()
            actor = slot.actor
            slot.load += 1
            try:
                answer = actor.play.remote(job.payload)
                try:
                    rollouts: list[Rollout] = await answer
                except asyncio.CancelledError:  # Ray does not tell the actor, which would play to the end
                    self._ray.cancel(answer)
                    raise
                columns = {record.rollout_id: record.columns for record in job.records}
                for rollout in rollouts:
                    rollout.columns = columns.get(rollout.rollout_id, {})
                return rollouts
            except RayTaskError:
                raise
            except RayError as error:  # the actor died, or the node that held its answer
                if isinstance(error, RayActorError) and slot.actor is actor:
                    self._replace(slot, error)
                if attempt == _NUM_RETRIES:
                    raise
            finally:
                slot.load -= 1
        raise AssertionError("unreachable: the loop above returns or raises")

    async def _choose(self) -> _ActorSlot:
        while True:
            ready = [slot for slot in self._slots if slot.is_ready]
            if ready:
                return min(ready, key=lambda slot: slot.load)
            if not self._starting:
                raise RuntimeError("no collector actor is running, and none could be started: see the actors' logs.")
            self._changed.clear()
            await self._changed.wait()

    def _replace(self, slot: _ActorSlot, error: Exception) -> None:
        logger.warning("a collector actor died (%s) and is replaced", error)
        with contextlib.suppress(Exception):  # if the actor is only unreachable, it must not continue
            self._ray.kill(slot.actor)
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
        """Do nothing: actors score their groups."""

    def shutdown(self) -> None:
        """Kill the actors; Ray keeps running."""
        self._search_as_before()
        for slot in self._slots:
            self._ray.kill(slot.actor)
