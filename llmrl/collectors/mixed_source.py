"""Rollouts of several environments in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from llmrl.collectors.concurrency import TurnCounts
from llmrl.collectors.rollout_runner import RolloutLimits
from llmrl.collectors.scheduler import RolloutTask
from llmrl.collectors.source import EnvSource
from llmrl.data import Rollout
from llmrl.engines import Engine
from llmrl.envs import MixedEnv
from llmrl.policies import LLMWrapperBase


class MixedSource:
    """Draws each group from the environment that `MixedEnv` chooses; the source of that one plays and scores it.

    Args:
        mixed: the environments.
        policy: generates, for all of them.
        limits: what may end a rollout early; or by the environments' names, where those that are not named have none.
        in_groups: see `EnvSource`.

    Raises:
        ValueError: if limits name an unknown environment; see also `EnvSource`.
    """

    def __init__(
        self,
        mixed: MixedEnv,
        policy: LLMWrapperBase,
        *,
        in_groups: bool,
        limits: RolloutLimits | Mapping[str, RolloutLimits],
    ) -> None:
        self.dataset_env = mixed
        self._prompts = mixed.prompts
        self.is_open = asyncio.Event()
        """Between turns, rollouts wait while it is not set."""
        self.is_open.set()
        names = [name for name, _ in mixed.items()]
        by_name = dict.fromkeys(names, limits) if isinstance(limits, RolloutLimits) else limits
        if unknown := sorted(set(by_name) - set(names)):
            raise ValueError(f"limits has {unknown}, and the environments are {names}.")
        self._sources = {
            name: EnvSource(
                env,
                policy,
                in_groups=in_groups,
                limits=by_name.get(name),
                is_open=self.is_open,
            )
            for name, env in mixed.items()
        }
        if any(source.needs_whole_groups for source in self._sources.values()):
            for source in self._sources.values():  # the groups of a scheduler are all of one size
                source.play_whole_groups()
        self._first = next(iter(self._sources.values()))
        self.group_size = max(source.group_size for source in self._sources.values())
        self.num_players = max(source.num_players for source in self._sources.values())

    @property
    def engine(self) -> Engine:
        """The engine that generates."""
        return self._first.engine

    @property
    def policy_version(self) -> int:
        """The engine's count of weight updates."""
        return self._first.policy_version

    def take_turn_counts(self) -> TurnCounts:
        """Return what the turns since the last call found of their contexts in the engine's cache."""
        counts = TurnCounts()
        for source in self._sources.values():
            counts.add(source.take_turn_counts())
        return counts

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Draw the next groups; fewer where all data ends.

        Raises:
            ValueError: when a function gives weights that are no shares.
        """
        return await self._drawn(num_groups, self.group_size, lambda source, count: source.open(count))

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw so many rollouts, group by group, of which the last may be cut; fewer where all data ends."""
        size = self._prompts.num_samples

        async def draw(source: EnvSource, num_groups: int) -> list[list[RolloutTask]]:
            return _in_groups(await source.open_rollouts(num_groups * size), size)

        async def draw_rest(source: EnvSource, num_groups: int) -> list[list[RolloutTask]]:
            return _in_groups(await source.open_rollouts(count % size), size)

        groups = await self._drawn(count // size, size, draw)
        groups += await self._drawn(int(count % size > 0), count % size, draw_rest)
        return [job for group in groups for job in group]

    async def _drawn(
        self, num_groups: int, size: int, draw: Callable[[EnvSource, int], Awaitable[list[list[RolloutTask]]]]
    ) -> list[list[RolloutTask]]:
        """Draw groups in the order of the mixture, all of an environment at once: each asks its thread, which costs."""
        groups: list[list[RolloutTask]] = []
        while len(groups) < num_groups and (chosen := self._prompts.choose_many(num_groups - len(groups), size)):
            drawn = {name: deque(await self._drawn_of(name, chosen, draw)) for name in dict(chosen)}
            for name, _ in chosen:
                if drawn[name]:
                    groups.append(self._named(name, drawn[name].popleft()))
                else:
                    self._prompts.end(name)
        return groups

    async def _drawn_of(
        self,
        name: str,
        chosen: Sequence[tuple[str, list[int]]],
        draw: Callable[[EnvSource, int], Awaitable[list[list[RolloutTask]]]],
    ) -> list[list[RolloutTask]]:
        source = self._sources[name]
        groups = [positions for one, positions in chosen if one == name]
        again = [positions for positions in groups if positions]
        jobs = iter(await source.open_at([place for positions in again for place in positions]) if again else ())
        drawn = [list(itertools.islice(jobs, len(positions))) for positions in again]
        num_new = len(groups) - len(again)
        return drawn + (await draw(source, num_new) if num_new else [])

    def _named(self, name: str, jobs: list[RolloutTask]) -> list[RolloutTask]:
        for job in jobs:
            job.positions = tuple(self._prompts.position(name, position) for position in job.positions)
            for record in job.records:
                record.env = name
        return jobs

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play one rollout to its end."""
        return await self._sources[job.records[0].env].play(job)

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Score a group together where its rubric does, and note what its environment's progress is."""
        name = rollouts[0].env
        await self._sources[name].score_group(rollouts)
        for rollout in rollouts:
            if rollout.is_scored:
                self._prompts.progress[name].add(rollout.reward)

    def shutdown(self) -> None:
        """End the environments' threads."""
        for source in self._sources.values():
            source.shutdown()


def _in_groups(jobs: list[RolloutTask], size: int) -> list[list[RolloutTask]]:
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]
