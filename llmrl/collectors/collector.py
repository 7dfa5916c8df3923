"""`LLMCollector`, which plays conversations and yields batches."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, TypedDict, get_args

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, TransformedEnv

from llmrl._utils.arguments import KnownArguments, check_choice, check_least
from llmrl.collectors.base import BatchCollector, CollectorSource
from llmrl.collectors.buffer import QueueBuffer, TakesBatches, TakesItems
from llmrl.collectors.concurrency import FIRST_LIMIT, READER, ConcurrencyLimit, CountsTurns, follow_load
from llmrl.collectors.gates import Gate, LatePolicy
from llmrl.collectors.groups import GroupRules
from llmrl.collectors.ray_source import RayActors, RaySource
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.rollout_runner import RolloutLimits
from llmrl.collectors.scheduler import RolloutScheduler, RolloutTask
from llmrl.collectors.shape import BatchShape, check_group_size
from llmrl.collectors.source import EnvSource, MixedSource
from llmrl.collectors.weights import WeightScheme
from llmrl.data import Rollout
from llmrl.engines.load import take_load
from llmrl.envs import EndOfData, MixedEnv
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PolicyVersion


class CollectorOptions(TypedDict, total=False):
    """Arguments of `LLMCollector` other than the environment and the policy."""

    groups_per_batch: int | None
    tokens_per_batch: int | None
    dialog_turns_per_batch: int | None
    yield_completed_trajectories: bool | None
    yield_only_last_steps: bool | None
    total_dialog_turns: int
    postproc: Callable[[TensorDictBase], TensorDictBase] | None
    replay_buffer: TakesBatches | None
    queue: TakesItems | None
    max_concurrent_rollouts: int | Literal["auto"] | None
    max_staleness: int | None
    late_groups: LatePolicy
    num_extra_groups: int
    reset_at_each_iter: bool
    group_rules: GroupRules | None
    limits: RolloutLimits | Mapping[str, RolloutLimits] | None
    track_policy_version: bool | PolicyVersion
    weight_sync_schemes: Mapping[str, WeightScheme] | None
    async_envs: bool | None
    flatten_data: bool | None
    verbose: bool


class LLMCollector(KnownArguments, BatchCollector):
    """Iterable that plays conversations with a policy and yields them in batches.

    These arguments define a batch:

    - `groups_per_batch`: this number of complete groups, as training rows `[num_rows]` (see the data contract);
    - `tokens_per_batch`: complete groups, at least one, as training rows with at most this number of tokens in total;
      a group that does not fit goes to the next batch, and its staleness grows with each update in between;
    - `dialog_turns_per_batch`: this number of turns `[num_turns]`, each with its `next`;
    - `yield_completed_trajectories`: finished conversations with at least `dialog_turns_per_batch` turns `[num_turns]`;
    - `yield_only_last_steps`: the last turns of `dialog_turns_per_batch` finished conversations. For the last two
      kinds, `dialog_turns_per_batch` is by default the environment's batch size, or 1 without one.

    No conversation waits for another between turns. By default only the groups that a batch needs are started, and
    dropped groups are replaced. Nothing is then in flight between two batches, so batches are on-policy if weights are
    updated between them. With `max_staleness`, collection continues during training (`StalenessGate`).

    Args:
        env: a `DatasetChatEnv`, usually transformed; several, as a `MixedEnv`; or a function that builds one.
        policy: policy that generates, such as a `vLLMWrapper`; or pass `policy_factory`.
        total_dialog_turns: number of turns after which iteration ends; -1 never ends.
        postproc: function applied to each batch before it is yielded or written, such as `MCAdvantage`. It returns the
            batch to train on; if that has no rows, another batch is collected.
        replay_buffer: buffer to extend with each batch, in the background after `start()`; iteration yields None.
        queue: queue that receives the elements of each batch one by one; the collector waits while it is full.
        max_concurrent_rollouts: maximum number of conversations in flight; by default all of a batch and of the batches
            ahead. If a number is given, turns, trajectories and last steps are collected ahead. `"auto"` adapts the
            number to the engine's memory, up to the default (`ConcurrencyLimit`); the engine must report its load.
        max_staleness: maximum age of a delivered group, in versions; None collects on demand.
        late_groups: `wait` for groups that would be too old in the next batch, or `drop` groups that are too old.
        num_extra_groups: number of groups started in excess; the slowest are dropped when the batch is full.
        reset_at_each_iter: start each batch afresh; surplus turns and unfinished conversations are dropped.
        group_rules: rules that select settled groups (filters, dynamic sampling); every drop is counted.
        limits: turn, prompt and time limits of a rollout and of a step; optionally by name for a `MixedEnv`.
        track_policy_version: whether to add a `PolicyVersion` that follows the engine; or your own `PolicyVersion`.
        weight_sync_schemes: schemes by policy name (`{"policy": scheme}`); by default the engine's own scheme.
        async_envs: must be true or None: conversations never wait for each other.
        flatten_data: must be true or None: batches have one dimension.
        verbose: whether to print a line about each batch to stderr.

    Raises:
        ValueError: if the arguments define no batch or contradict each other, or the environment is batch-locked.
        TypeError: if an argument is unknown, in which case the message names the nearest one or an alternative, or has
            a wrong type. On iteration, if `postproc` returns no TensorDict.
        CollectionStalled: on iteration, if too many groups in a row had nothing to train on; `NoSignal` if none failed
    """

    def __init__(
        self,
        env: EnvBase | MixedEnv | Callable[[], EnvBase | MixedEnv] | RayActors,
        policy: LLMWrapperBase | None = None,
        *,
        policy_factory: Callable[[], LLMWrapperBase] | None = None,
        groups_per_batch: int | None = None,
        tokens_per_batch: int | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_completed_trajectories: bool | None = None,
        yield_only_last_steps: bool | None = None,
        total_dialog_turns: int = -1,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        replay_buffer: TakesBatches | None = None,
        queue: TakesItems | None = None,
        max_concurrent_rollouts: int | Literal["auto"] | None = None,
        max_staleness: int | None = None,
        late_groups: LatePolicy = "wait",
        num_extra_groups: int = 0,
        reset_at_each_iter: bool = False,
        group_rules: GroupRules | None = None,
        limits: RolloutLimits | Mapping[str, RolloutLimits] | None = None,
        track_policy_version: bool | PolicyVersion = False,
        weight_sync_schemes: Mapping[str, WeightScheme] | None = None,
        async_envs: bool | None = None,
        flatten_data: bool | None = None,
        verbose: bool = False,
    ) -> None:
        if async_envs is False:
            raise ValueError(
                "async_envs=False is not supported, since no conversation waits for another: to play one conversation "
                "at a time, pass max_concurrent_rollouts=1."
            )
        if flatten_data is False:
            raise ValueError(
                "flatten_data=False is not supported, since conversations differ in length: batches have one "
                "dimension; for one conversation per batch, pass yield_completed_trajectories=True."
            )
        if group_rules is not None and not isinstance(group_rules, GroupRules):
            raise TypeError(f"group_rules must be GroupRules, got {group_rules!r}.")
        if limits is not None and not isinstance(limits, RolloutLimits | Mapping):
            raise TypeError(f"limits must be RolloutLimits, or a mapping of names to them, got {limits!r}.")
        if postproc is not None and not callable(postproc):
            raise TypeError(f"postproc must be a function of a batch, got {postproc!r}.")
        shape = BatchShape.of(
            groups_per_batch=groups_per_batch,
            tokens_per_batch=tokens_per_batch,
            dialog_turns_per_batch=dialog_turns_per_batch,
            yield_completed_trajectories=yield_completed_trajectories,
            yield_only_last_steps=yield_only_last_steps,
        )
        if (policy is None) == (policy_factory is None):
            raise ValueError("exactly one of policy and policy_factory is needed.")
        num_given = None if max_concurrent_rollouts == "auto" else max_concurrent_rollouts
        if not isinstance(num_given, int | None):
            raise TypeError(f"max_concurrent_rollouts is a number, 'auto' or None, got {max_concurrent_rollouts!r}.")
        check_least(1, max_concurrent_rollouts=num_given)
        check_least(0, num_extra_groups=num_extra_groups, max_staleness=max_staleness)
        check_choice(get_args(LatePolicy), late_groups=late_groups)
        if late_groups == "drop" and max_staleness is None:
            raise ValueError("late_groups='drop' needs max_staleness, which bounds the age of a group.")
        if num_extra_groups and (max_staleness is not None or shape.kind != "groups"):
            raise ValueError(
                "num_extra_groups needs groups_per_batch, and excludes max_staleness, which would keep the extra "
                "groups for later."
            )
        if reset_at_each_iter and max_staleness is not None:
            raise ValueError(
                "reset_at_each_iter starts each batch anew, and max_staleness collects ahead: pass one of them."
            )
        if queue is not None:
            if replay_buffer is not None:
                raise ValueError("batches go to either a replay_buffer or a queue: pass one of them.")
            replay_buffer = QueueBuffer(queue)
        source: CollectorSource
        has_default_size = dialog_turns_per_batch is None and not shape.is_grouped
        limits = RolloutLimits() if limits is None else limits
        self.policy: LLMWrapperBase
        self.policy_version_tracker: PolicyVersion | None = None
        """Transform that writes each step's version, if `track_policy_version` requests one."""
        make_policy: Callable[[], LLMWrapperBase] = policy_factory or (lambda: policy)  # type: ignore[assignment,return-value]
        if isinstance(env, RayActors):
            in_groups = shape.is_grouped
            source = RaySource(env, make_policy, in_groups=in_groups, track_version=track_policy_version, limits=limits)
            if has_default_size:
                shape = replace(shape, size=source.default_size)
        else:
            self.env: EnvBase | MixedEnv = env if isinstance(env, EnvBase | MixedEnv) else env()
            if has_default_size and isinstance(self.env, EnvBase):
                shape = replace(shape, size=max(1, self.env.batch_size.numel()))
        gate: Gate
        if max_staleness is not None:
            gate = shape.staleness_gate(max_staleness=max_staleness, late=late_groups)
        else:
            gate = shape.demand_gate(
                num_extra=num_extra_groups,
                num_ahead=0 if shape.is_grouped or reset_at_each_iter else num_given or 0,
                reset_each_batch=reset_at_each_iter,
            )
        if not isinstance(env, RayActors):
            source = self._local_source(shape, limits, track_policy_version)
        per_batch = shape.size if shape.kind != "tokens" else 8
        needed = (per_batch * (1 + (max_staleness or 0)) + num_extra_groups) * source.group_size
        in_flight = num_given or needed
        if in_flight < source.num_players:
            raise ValueError(
                f"max_concurrent_rollouts must be at least {source.num_players}, the players of a game, who wait for "
                f"each other; got {in_flight}."
            )
        rules = group_rules or GroupRules()
        if rules.min_survivors > source.group_size:
            raise ValueError(
                f"min_survivors={rules.min_survivors} drops every group, since a group has {source.group_size} "
                "rollouts: lower it, or raise the environment's repeats."
            )
        for transform in (postproc, getattr(replay_buffer, "transform", None)):
            check_group_size(transform, source.dataset_env)
        if isinstance(source, EnvSource | MixedSource):
            self.policy = make_policy()  # after all checks that need none, since it may start an engine
            source.use_policy(self.policy)
        self.yield_only_last_steps = shape.kind == "last_steps"
        self.yield_completed_trajectories = self.yield_only_last_steps or shape.kind == "trajectories"
        self.reset_at_each_iter = reset_at_each_iter
        self.async_envs = True
        self.flatten_data = True
        self._play_concurrency = num_given
        limit = None
        if max_concurrent_rollouts == "auto":
            if not isinstance(source, CountsTurns) or take_load(source.engine, READER) is None:
                raise ValueError(
                    "max_concurrent_rollouts='auto' needs a collector in this process and an engine that reports "
                    f"its load, such as AsyncVLLM; {type(self).__name__} has {type(source.engine).__name__}: pass a "
                    "number."
                )
            limit = ConcurrencyLimit(FIRST_LIMIT, least=source.num_players, most=in_flight)
            in_flight = limit.value
        scheduler = RolloutScheduler(
            source,
            gate,
            rules=rules,
            max_concurrent_rollouts=in_flight,
            units=shape.units,
            patience=shape.size if shape.kind == "groups" else 8,
            is_open=source.is_open,
        )
        super().__init__(
            source,
            scheduler,
            shape,
            total_dialog_turns=total_dialog_turns,
            postproc=postproc,
            replay_buffer=replay_buffer,
            reset_each_batch=reset_at_each_iter,
            weight_sync_schemes=weight_sync_schemes,
            verbose=verbose,
        )
        if limit is not None:
            assert isinstance(source, CountsTurns)
            self._background.submit(follow_load(source, scheduler, limit))

    @property
    def max_concurrent_rollouts(self) -> int:
        """Maximum number of conversations in flight; with `"auto"`, its current value."""
        return self._scheduler.max_concurrent_rollouts

    def _local_source(
        self,
        shape: BatchShape,
        limits: RolloutLimits | Mapping[str, RolloutLimits],
        track_policy_version: bool | PolicyVersion,
    ) -> CollectorSource:
        if isinstance(self.env, MixedEnv):
            if track_policy_version:
                raise ValueError(
                    "track_policy_version works for one environment only: append a PolicyVersion to each environment."
                )
            return MixedSource(self.env, in_groups=shape.is_grouped, limits=limits)
        if not isinstance(limits, RolloutLimits):
            raise ValueError(f"limits by name are those of a MixedEnv: pass RolloutLimits, not {sorted(limits)}.")
        if track_policy_version:
            if not isinstance(track_policy_version, PolicyVersion):
                track_policy_version = PolicyVersion(source=lambda: self.policy.engine.policy_version)
            self.policy_version_tracker = track_policy_version
            self.env = TransformedEnv(self.env, track_policy_version)
        return EnvSource(self.env, in_groups=shape.is_grouped, limits=limits)

    def increment_version(self) -> None:
        """Count an update in your own `PolicyVersion`; RuntimeError if the engine counts them."""
        if self.policy_version_tracker is None:
            raise RuntimeError(
                "the engine counts its versions, which update_policy_weights_ increments: do not "
                "call increment_version."
            )
        self.policy_version_tracker.increment_version()

    def play(self, num_rollouts: int) -> list[Rollout]:
        """Play the next `num_rollouts` rollouts, for evaluation, and set `report` and `rollouts`.

        Nothing is filtered or replaced: failed rollouts are included.

        Raises:
            EndOfData: if the dataset has no further prompts.
            ValueError: if the number is below 1, or not a multiple of the number of players of a game.
        """
        check_least(1, num_rollouts=num_rollouts)
        if num_rollouts % (num_players := self._source.num_players):
            raise ValueError(f"num_rollouts must be a multiple of a game's {num_players} players, got {num_rollouts}.")
        started = time.perf_counter()
        self.num_played = 0
        self.rollouts = self._background.run(self._play(num_rollouts))
        self._frames += sum(rollout.num_turns for rollout in self.rollouts)
        _, dropped = GroupRules().judge(self.rollouts)
        self.report = CollectionReport.of(self.rollouts, seconds=time.perf_counter() - started, dropped=dropped)
        return self.rollouts

    async def _play(self, num_rollouts: int) -> list[Rollout]:
        source = self._source
        slots = asyncio.Semaphore(self._play_concurrency or num_rollouts)
        jobs = await source.open_rollouts(num_rollouts)
        if not jobs:
            raise EndOfData("the dataset has no further prompts.")

        async def play(job: RolloutTask) -> list[Rollout]:
            async with slots:
                played = await source.play(job)
            self.num_played += len(played)
            return played

        rollouts = list(itertools.chain(*await asyncio.gather(*map(play, jobs))))
        for _, group in itertools.groupby(rollouts, lambda rollout: rollout.group_id):
            await source.score_group(list(group))
        return rollouts
