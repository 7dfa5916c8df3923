"""`LLMCollector`: plays conversations and yields batches."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from llmrl.collectors.base import BatchCollector, dataset_env_of
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.player import RolloutLimits, RolloutPlayer
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.scheduler import Job
from llmrl.collectors.shape import BatchShape
from llmrl.collectors.source import EnvSource
from llmrl.collectors.staleness import LatePolicy
from llmrl.collectors.stepper import EnvStepper
from llmrl.data import Rollout
from llmrl.envs import EndOfData
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PolicyVersion


class LLMCollector(BatchCollector):
    """Plays conversations with a policy and yields them in batches; iterate it.

    These say what a batch is:

    - `groups_per_batch`: so many complete groups, as training rows `[num_rows]` (see the data contract);
    - `tokens_per_batch`: complete groups, as training rows of at most so many tokens (one group at least);
    - `dialog_turns_per_batch`: so many turns `[num_turns]`, each with its `next`;
    - `yield_completed_trajectories`: finished conversations `[num_turns]`, one, or as many as make
      `dialog_turns_per_batch`;
    - `yield_only_last_steps`: the last turn of one finished conversation, or of `dialog_turns_per_batch` of them.

    One rollout is the unit: no conversation waits for another between turns. Of groups, exactly what a batch lacks is
    started, and dropped groups are replaced: nothing is in flight between two batches, so a batch is on-policy when
    weights are updated between them. With `max_staleness`, collection goes on while the trainer trains (see
    `StalenessGate`). With `replay_buffer`, `start()` fills it in the background.

    Args:
        env: a `DatasetChatEnv`, usually transformed; or a function that builds one.
        policy: generates, such as a `vLLMWrapper`; or pass `policy_factory`.
        total_dialog_turns: turns after which iteration ends; -1 never ends.
        postproc: applied to each batch before it is yielded or written, such as `MCAdvantage`.
        replay_buffer: is extended with each batch instead; iteration then yields None.
        max_concurrent_rollouts: conversations in flight; by default all of a batch, and of those ahead. Turns,
            trajectories and last steps are collected ahead when it is given.
        max_staleness: versions that a group may be old when it is delivered; None collects on demand.
        late_groups: `wait` for groups that would be too old in the next batch, or `drop` those that are.
        num_extra_groups: groups started beyond the need; the slowest are dropped when the batch is full.
        group_rules: what of a settled group is delivered (filters, dynamic sampling); every drop is counted.
        limits: turn, prompt and time limits of a rollout.
        step_timeout_seconds: limit of one environment step, its tools included.
        track_policy_version: adds a `PolicyVersion` that follows the engine; or one of yours.
        weight_sync_schemes: by policy name (`{"policy": scheme}`); `update_policy_weights_` uses them.

    Raises:
        ValueError: when it is not clear what a batch is, or the environment is batch-locked.
        CollectionStalled: on iteration, when group after group has nothing to train on.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: LLMWrapperBase | None = None,
        policy_factory: Callable[[], LLMWrapperBase] | None = None,
        groups_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_completed_trajectories: bool = False,
        yield_only_last_steps: bool = False,
        total_dialog_turns: int = -1,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: Any = None,
        max_concurrent_rollouts: int | None = None,
        max_staleness: int | None = None,
        late_groups: LatePolicy = "wait",
        num_extra_groups: int = 0,
        group_rules: GroupRules | None = None,
        limits: RolloutLimits | None = None,
        step_timeout_seconds: float | None = None,
        track_policy_version: bool | PolicyVersion = False,
        weight_sync_schemes: Mapping[str, Any] | None = None,
    ) -> None:
        shape = BatchShape.of(
            groups_per_batch=groups_per_batch,
            tokens_per_batch=tokens_per_batch,
            dialog_turns_per_batch=dialog_turns_per_batch,
            yield_completed_trajectories=yield_completed_trajectories,
            yield_only_last_steps=yield_only_last_steps,
        )
        if (policy is None) == (policy_factory is None):
            raise ValueError("exactly one of policy and policy_factory is needed.")
        self.policy: LLMWrapperBase = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.env: EnvBase = env if isinstance(env, EnvBase) else env()
        if track_policy_version:
            follow = PolicyVersion(source=lambda: self.policy.engine.policy_version)
            tracker = track_policy_version if isinstance(track_policy_version, PolicyVersion) else follow
            self.env = TransformedEnv(self.env, tracker)
        dataset_env = dataset_env_of(self.env)
        is_open = asyncio.Event()
        is_open.set()
        self._stepper = EnvStepper(self.env, timeout_seconds=step_timeout_seconds, keep_steps=not shape.is_grouped)
        if shape.is_grouped and dataset_env is None:
            raise ValueError("groups need a DatasetChatEnv, whose repeats give the size of a group.")
        player = RolloutPlayer(self._stepper, self.policy, limits=limits or RolloutLimits(), is_open=is_open)
        is_group_scored = player.rubric is not None and player.rubric.is_group_scored
        self._env_source = EnvSource(
            self._stepper,
            player,
            None if dataset_env is None else dataset_env.prompts,
            is_grouped=shape.is_grouped or is_group_scored,
        )
        self._play_concurrency = max_concurrent_rollouts
        super().__init__(
            self._env_source,
            dataset_env=dataset_env,
            engine=self.policy.engine,
            shape=shape,
            rules=group_rules or GroupRules(is_failure_shared=is_group_scored),
            max_concurrent_rollouts=max_concurrent_rollouts,
            is_open=is_open,
            num_extra_groups=num_extra_groups,
            max_staleness=max_staleness,
            late_groups=late_groups,
            total_dialog_turns=total_dialog_turns,
            postproc=postproc,
            replay_buffer=replay_buffer,
            weight_sync_schemes=weight_sync_schemes,
        )

    def play(self, num_rollouts: int) -> list[Rollout]:
        """Play the next so many rollouts to their ends, whatever a batch is; also fills `report` and `rollouts`.

        For evaluation: nothing is filtered or replaced, and failed ones are among them.

        Raises:
            EndOfData: when the dataset ends before the first of them.
        """
        started = time.perf_counter()
        self.rollouts = self._run(self._play(num_rollouts))
        self._num_turns += sum(rollout.num_turns for rollout in self.rollouts)
        kept_or_dropped = GroupRules().judge(self.rollouts)
        self.report = CollectionReport.of(
            self.rollouts, seconds=time.perf_counter() - started, dropped=kept_or_dropped[1]
        )
        return self.rollouts

    async def _play(self, num_rollouts: int) -> list[Rollout]:
        source, slots = self._env_source, asyncio.Semaphore(self._play_concurrency or num_rollouts)
        jobs = await source.open_rollouts(num_rollouts)
        if not jobs:
            raise EndOfData("the dataset has no further prompts.")

        async def play(job: Job) -> Rollout:
            async with slots:
                return (await source.play(job))[0]

        rollouts = list(await asyncio.gather(*map(play, jobs)))
        for _, group in itertools.groupby(rollouts, lambda rollout: rollout.group_id):
            await source.score_group(list(group))
        return rollouts

    def shutdown(self) -> None:
        """Cancel what is in flight and end the collector's threads. The engine is its owner's to shut down."""
        super().shutdown()
        self._stepper.shutdown()
