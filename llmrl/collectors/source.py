"""Sources of rollouts with one or several environments and a policy in this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from tensordict import TensorDict, TensorDictBase
from tensordict.utils import unravel_key
from torchrl.envs import EnvBase

from llmrl._utils.failure import as_exception
from llmrl._utils.garbage import search_rarely
from llmrl.collectors.concurrency import TurnCounts
from llmrl.collectors.rollout_runner import RolloutLimits, RolloutRunner
from llmrl.collectors.scheduler import RolloutTask
from llmrl.data import Rollout
from llmrl.data.tensordicts import dataset_columns, plain
from llmrl.engines import Engine
from llmrl.envs import ChatEnv, DataLoadingPrimer, DatasetChatEnv, EndOfData, MixedEnv
from llmrl.envs.primer import dataset_env_of
from llmrl.envs.sampler import Drawn
from llmrl.envs.stepper import EnvStepper
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric
from llmrl.transforms import environment_parts, find_rubric_rewards, joint_rubric

logger = logging.getLogger(__name__)

_SOLO_IDS = itertools.count()


class EnvSource:
    """Source that opens rollouts by resetting an environment; `use_policy` sets its policy.

    With `in_groups` it plays groups of one prompt each, which need a `DatasetChatEnv`. Rollouts
    wait between turns while `is_open` (by default a new event) is cleared.

    Raises:
        ValueError: if `in_groups` and the environment has no dataset, if the environment is batch-locked, or if a tool
            comes after a reward.
        UnknownRewardInput: if a reward function has an input that is known to be missing.
    """

    def __init__(
        self,
        env: EnvBase,
        *,
        in_groups: bool,
        limits: RolloutLimits | None = None,
        is_open: asyncio.Event | None = None,
    ) -> None:
        self._limits = limits or RolloutLimits()
        self.stepper = EnvStepper(env, timeout_seconds=self._limits.step_timeout_seconds, keep_steps=not in_groups)
        self.dataset_env = dataset_env_of(env)
        if in_groups and self.dataset_env is None:
            raise ValueError("groups need a DatasetChatEnv, since its repeats argument is the size of a group.")
        self.is_open = is_open or asyncio.Event()
        """Event that rollouts wait for between turns while it is cleared."""
        self.is_open.set()
        self._rubric = _checked_rubric(env)
        self.is_group_scored = self._rubric is not None and self._rubric.is_group_scored
        """Whether the rollouts of a group are scored together."""
        self.prompts = None if self.dataset_env is None else self.dataset_env.prompts
        self.num_players = len(roles_of(self.dataset_env))
        """Number of rollouts that wait for each other, consecutive in their group."""
        self.needs_whole_groups = self.is_group_scored or self.num_players > 1
        """Whether the rollouts of a group are played together, independent of the kind of batch."""
        self._are_groups_whole = False
        self._has_warned = False
        self.group_size = self.prompts.num_samples if self.prompts is not None and in_groups else 1
        """Number of rollouts that are drawn together."""
        if self.needs_whole_groups:
            self.play_whole_groups()

    def use_policy(self, policy: LLMWrapperBase) -> None:
        """Play rollouts with this policy.

        Raises:
            ValueError: if its `input_mode` is not that of the environment.
            RenderingError: if the environment has tools and the policy's chat template cannot write their results.
        """
        _check_modes(self.stepper.env, policy)
        if self.stepper.env.observation_spec.get("tools", None) is not None:
            policy.check_tools()
        self.runner = RolloutRunner(
            self.stepper, policy, rubric=self._rubric, limits=self._limits, is_open=self.is_open
        )
        self._search_as_before = search_rarely(self)

    def play_whole_groups(self) -> None:
        """Draw whole groups, even if batches are counted in turns."""
        self._are_groups_whole = True
        if self.prompts is not None:
            self.group_size = self.prompts.num_samples

    @property
    def engine(self) -> Engine:
        """The engine that generates."""
        return self.runner.policy.engine

    @property
    def policy_version(self) -> int:
        """Number of weight updates of the engine."""
        return self.engine.policy_version

    def take_turn_counts(self) -> TurnCounts:
        """Return the counts of cache hits since the last call."""
        counts = self.runner.turn_counts
        self.runner.turn_counts = TurnCounts()
        return counts

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Reset the environment for each rollout of the next groups; fewer if the data ends.

        Raises RuntimeError if another reader draws from the same prompts, so that groups are mixed.
        """
        size = self.group_size
        jobs = await self.stepper.call(self._draw_from_a_group, num_groups * size)
        groups = [group for group in _in_groups(jobs, size) if len(group) == size]
        for group in groups:
            if size > 1 and len({job.records[0].group_id for job in group}) > 1:
                raise RuntimeError(
                    "another reader drew from the environment's prompts while the collector drew a group: "
                    f"it holds {[job.records[0].rollout_id for job in group]}. Give the collector an environment that "
                    "nothing else resets while it collects."
                )
        return groups

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw and open `count` rollouts, fewer if the data ends; slow ones are opened later."""
        return await self.stepper.call(self._draw_from_a_group if self._are_groups_whole else self._draw, count)

    async def open_at(self, positions: Sequence[int]) -> list[RolloutTask]:
        """Reset the environment for the rollouts at these positions of its dataset."""

        def draw() -> list[RolloutTask]:
            assert self.prompts is not None, "the environment has no dataset"
            self.prompts.draw_next(positions)
            return self._draw(len(positions))

        return await self.stepper.call(draw)

    def _draw_from_a_group(self, count: int) -> list[RolloutTask]:
        if self.prompts is not None and self.group_size > 1:
            self.prompts.skip_to_group()
        return self._draw(count)

    def _draw_alone(self, count: int, positions: Sequence[int]) -> list[RolloutTask]:
        assert self.prompts is not None and self.dataset_env is not None
        return [
            RolloutTask(records=[drawn_record(self.dataset_env, drawn)], payload=drawn, positions=(position,))
            for drawn, position in zip(self.prompts.draw_many(count), positions, strict=True)
        ]

    def _draw(self, count: int) -> list[RolloutTask]:
        positions: list[int] = []
        if self.prompts is not None:
            positions = self.prompts.upcoming(count)
            count = len(positions)
        if not count:
            return []
        if self.stepper.is_opened_alone:
            return self._draw_alone(count, positions)
        elements: tuple[TensorDictBase, ...]
        try:
            elements = self.stepper.env.reset(TensorDict(batch_size=[count])).unbind(0)
        except EndOfData as end:  # the data has other readers or an unknown size
            return self._draw(end.num_left)
        except BaseException as error:
            return self._drawn_one_by_one(count, positions, as_exception(error))
        return [
            RolloutTask(
                records=[self._opened_record(element)],
                payload=element,
                positions=tuple(positions[index : index + 1]),  # without a dataset there are none
            )
            for index, element in enumerate(elements)
        ]

    def _opened_record(self, element: TensorDictBase) -> Rollout:
        group_id = plain(element.get(("rollout", "group_id"), None)) or f"solo/{next(_SOLO_IDS)}"
        sample_index = int(element.get(("rollout", "sample_index"), 0))
        return Rollout(
            rollout_id=f"{group_id}/{sample_index}",
            group_id=group_id,
            sample_index=sample_index,
            role=_role_of(self.dataset_env, sample_index),
            group_size=int(element.get(("rollout", "group_size"), 1)),
            columns=dataset_columns(element),
        )

    def _drawn_one_by_one(self, count: int, positions: list[int], error: Exception) -> list[RolloutTask]:
        """Draw again after a common reset failed with `error`, so that only the culprits fail."""
        if self.prompts is not None and self.prompts.upcoming(count) != positions:  # the reset has drawn them
            self.prompts.load_state_dict(self.prompts.state_dict(unfinished=positions))
        if count > 1:
            return [job for _ in range(count) for job in self._draw(1)]
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a prompt could not be opened, so its rollouts fail; further such errors are only in their records",
                exc_info=error,
            )
        if self.dataset_env is None:
            record = self._opened_record(TensorDict(batch_size=[]))
        else:
            record = drawn_record(self.dataset_env, self.dataset_env.prompts.draw())
        return [RolloutTask(records=[record], payload=error, positions=tuple(positions))]

    async def play(self, job: RolloutTask) -> list[Rollout]:
        """Play one rollout to its end."""
        return [await self.runner.run(job)]

    async def score_group(self, rollouts: list[Rollout]) -> None:
        """Score a group together if its rubric does so and no rollout of it failed."""
        if self.is_group_scored and all(rollout.status.is_success for rollout in rollouts):
            await self.runner.score(rollouts)

    def shutdown(self) -> None:
        """End the environment's threads; the owner closes the environment and the engine."""
        self.stepper.shutdown()
        self.runner.judge_loop.close()
        self._search_as_before()


def _checked_rubric(env: EnvBase) -> Rubric | None:
    """Return the rubric of a complete environment; raise the errors of `RubricReward`."""
    rewards = find_rubric_rewards(env)
    for reward in rewards:
        reward.check_order()
        reward.check_inputs()
    return joint_rubric(rewards)


def _check_modes(env: EnvBase, policy: LLMWrapperBase) -> None:
    """Raise ValueError if policy and environment cannot read what the other writes."""
    chat_env = environment_parts(env)[0]
    if not isinstance(chat_env, ChatEnv) or chat_env.input_mode == policy.input_mode:
        return
    # A transform may write prompts for the policy; then the policy must write what the environment reads.
    is_read = unravel_key(policy.input_key) in env.observation_spec.keys(include_nested=True)
    if not is_read or chat_env.input_mode not in policy.out_keys:
        raise ValueError(
            f"the policy has input_mode={policy.input_mode!r}, and the environment has "
            f"input_mode={chat_env.input_mode!r}: build the policy with input_mode={chat_env.input_mode!r}."
        )


def drawn_record(dataset_env: DatasetChatEnv | DataLoadingPrimer, drawn: Drawn) -> Rollout:
    """Return the record of a rollout that was drawn from a dataset and is not opened yet."""
    row, group_id, sample_index = drawn
    return Rollout(
        rollout_id=f"{group_id}/{sample_index}",
        group_id=group_id,
        sample_index=sample_index,
        role=_role_of(dataset_env, sample_index),
        group_size=dataset_env.prompts.num_samples,
        columns={**dict.fromkeys(dataset_env.columns), **row},
    )


def roles_of(dataset_env: object) -> tuple[str, ...]:
    """Return the roles that a group's rollouts play in turn; one without a name if no game."""
    return getattr(dataset_env, "roles", ("",))


def _role_of(dataset_env: object, sample_index: int) -> str:
    roles = roles_of(dataset_env)
    return roles[sample_index % len(roles)]


Draw: TypeAlias = Callable[[EnvSource, int, int], Awaitable[list[list[RolloutTask]]]]
"""Function that draws a number of groups of a size from a source."""


class MixedSource:
    """Source that draws each group from the environment that `MixedEnv` chooses.

    Limits may be given by environment name; environments without an entry have no limits.

    Raises ValueError if `limits` names an unknown environment; further errors as `EnvSource`.
    """

    def __init__(
        self,
        mixed: MixedEnv,
        *,
        in_groups: bool,
        limits: RolloutLimits | Mapping[str, RolloutLimits],
    ) -> None:
        self.dataset_env = mixed
        self._prompts = mixed.prompts
        self.is_open = asyncio.Event()
        """Event that rollouts wait for between turns while it is cleared."""
        envs = dict(mixed.items())
        by_name = dict.fromkeys(envs, limits) if isinstance(limits, RolloutLimits) else limits
        if unknown := sorted(set(by_name) - set(envs)):
            raise ValueError(f"limits names the unknown environments {unknown}; the environments are {list(envs)}.")
        self._sources = {
            name: EnvSource(env, in_groups=in_groups, limits=by_name.get(name), is_open=self.is_open)
            for name, env in envs.items()
        }
        if any(source.needs_whole_groups for source in self._sources.values()):
            for source in self._sources.values():  # a scheduler's groups all have the same size
                source.play_whole_groups()
        self._first = next(iter(self._sources.values()))
        self.group_size = max(source.group_size for source in self._sources.values())
        self.num_players = max(source.num_players for source in self._sources.values())

    def use_policy(self, policy: LLMWrapperBase) -> None:
        """Play all rollouts with this policy; raise the errors of `EnvSource.use_policy`."""
        for source in self._sources.values():
            source.use_policy(policy)

    @property
    def engine(self) -> Engine:
        """The engine that generates."""
        return self._first.engine

    @property
    def policy_version(self) -> int:
        """Number of weight updates of the engine."""
        return self._first.policy_version

    def take_turn_counts(self) -> TurnCounts:
        """Return the counts of cache hits since the last call."""
        counts = TurnCounts()
        for source in self._sources.values():
            counts.add(source.take_turn_counts())
        return counts

    async def open(self, num_groups: int) -> list[list[RolloutTask]]:
        """Draw groups, fewer if all data ends; raise ValueError if a weight function is invalid."""
        return await self._drawn(num_groups, self.group_size, lambda source, count, size: source.open(count))

    async def open_rollouts(self, count: int) -> list[RolloutTask]:
        """Draw `count` rollouts, fewer if all data ends; the last group may be incomplete."""
        size = self._prompts.num_samples
        num_whole, num_left = divmod(count, size)
        groups = await self._drawn(num_whole, size, _draw_in_groups)
        groups += await self._drawn(int(num_left > 0), num_left, _draw_in_groups)
        return list(itertools.chain(*groups))

    async def _drawn(self, num_groups: int, size: int, draw: Draw) -> list[list[RolloutTask]]:
        """Draw groups in the mixture's order, with one call per environment and round."""
        groups: list[list[RolloutTask]] = []
        while len(groups) < num_groups and (chosen := self._prompts.choose_many(num_groups - len(groups), size)):
            drawn = {name: deque(await self._drawn_of(name, chosen, size, draw)) for name in dict(chosen)}
            for name, _ in chosen:
                if drawn[name]:
                    groups.append(self._named(name, drawn[name].popleft()))
                else:
                    self._prompts.end(name)
        return groups

    async def _drawn_of(
        self, name: str, chosen: Sequence[tuple[str, list[int]]], size: int, draw: Draw
    ) -> list[list[RolloutTask]]:
        source = self._sources[name]
        groups = [positions for one, positions in chosen if one == name]
        again = [positions for positions in groups if positions]
        jobs = iter(await source.open_at([place for positions in again for place in positions]) if again else ())
        drawn = [list(itertools.islice(jobs, len(positions))) for positions in again]
        num_new = len(groups) - len(again)
        return drawn + (await draw(source, num_new, size) if num_new else [])

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
        """Score a group together if its rubric does so, and record the environment's progress."""
        name = rollouts[0].env
        await self._sources[name].score_group(rollouts)
        for rollout in rollouts:
            if rollout.is_scored:
                self._prompts.progress[name].add(rollout.reward)

    def shutdown(self) -> None:
        """End the environments' threads."""
        for source in self._sources.values():
            source.shutdown()


async def _draw_in_groups(source: EnvSource, num_groups: int, size: int) -> list[list[RolloutTask]]:
    return _in_groups(await source.open_rollouts(num_groups * size), size)


def _in_groups(jobs: list[RolloutTask], size: int) -> list[list[RolloutTask]]:
    return [jobs[start : start + size] for start in range(0, len(jobs), size)]
