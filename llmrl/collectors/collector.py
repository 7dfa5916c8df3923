"""`LLMCollector`: plays conversations and yields batches."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.envs import EnvBase, TransformedEnv

from llmrl.collectors.player import RolloutLimits, RolloutPlayer, as_scored
from llmrl.collectors.report import CollectionReport
from llmrl.collectors.rows import batch_rows
from llmrl.collectors.stepper import EnvStepper
from llmrl.data import Rollout, RolloutStatus
from llmrl.envs import DatasetChatEnv, EndOfData
from llmrl.policies import LLMWrapperBase
from llmrl.transforms import PolicyVersion

logger = logging.getLogger("llmrl")

MAX_EMPTY_BATCHES = 8
"""So many batches in a row without a single trainable row end the collection with an error."""


class CollectionStalled(RuntimeError):
    """Batch after batch came without anything to train on."""


class LLMCollector:
    """Plays conversations with a policy and yields them in batches; iterate it.

    Exactly one of these says what a batch is:

    - `groups_per_batch`: so many complete groups, as training rows `[num_rows]` (see the data contract);
    - `dialog_turns_per_batch`: so many turns `[num_turns]`, each with its `next`;
    - `yield_completed_trajectories`: one finished conversation `[num_turns]`;
    - `yield_only_last_steps`: one last turn of a finished conversation `[1]`, or so many with
      `dialog_turns_per_batch`.

    Nothing is in flight between two batches, so a batch is on-policy when weights are updated between them. One
    rollout is the unit: no conversation waits for another between turns.

    Args:
        env: a `DatasetChatEnv`, usually transformed; or a function that builds one.
        policy: generates, such as a `vLLMWrapper`; or pass `policy_factory`.
        total_dialog_turns: turns after which iteration ends; -1 never ends.
        postproc: applied to each batch before it is yielded, such as `MCAdvantage`.
        max_concurrent_rollouts: conversations in flight; by default all of a batch.
        limits: turn, prompt and time limits of a rollout.
        step_timeout_seconds: limit of one environment step.
        track_policy_version: adds a `PolicyVersion` that follows the engine.
        weight_sync_senders: by policy name (`{"policy": sender}`); `update_policy_weights_` uses them.

    Raises:
        ValueError: when it is not clear what a batch is, or the environment is batch-locked.
        CollectionStalled: on iteration, when batch after batch has nothing to train on.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: LLMWrapperBase | None = None,
        policy_factory: Callable[[], LLMWrapperBase] | None = None,
        groups_per_batch: int | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_completed_trajectories: bool = False,
        yield_only_last_steps: bool = False,
        total_dialog_turns: int = -1,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        max_concurrent_rollouts: int | None = None,
        limits: RolloutLimits | None = None,
        step_timeout_seconds: float | None = None,
        track_policy_version: bool = False,
        weight_sync_senders: Mapping[str, Any] | None = None,
    ) -> None:
        if (policy is None) == (policy_factory is None):
            raise ValueError("exactly one of policy and policy_factory is needed.")
        if (groups_per_batch is not None) + yield_completed_trajectories + (
            dialog_turns_per_batch is not None or yield_only_last_steps
        ) != 1:
            raise ValueError(
                "say what a batch is: one of groups_per_batch, yield_completed_trajectories, or "
                "dialog_turns_per_batch (with or without yield_only_last_steps)."
            )
        for name, value in (
            ("groups_per_batch", groups_per_batch),
            ("dialog_turns_per_batch", dialog_turns_per_batch),
            ("max_concurrent_rollouts", max_concurrent_rollouts),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        self.policy: LLMWrapperBase = policy if policy is not None else policy_factory()  # type: ignore[misc]
        self.env: EnvBase = env if isinstance(env, EnvBase) else env()
        if track_policy_version:
            self.env = TransformedEnv(self.env, PolicyVersion(lambda: self.policy.engine.policy_version))
        self._dataset_env = _dataset_env(self.env)
        self.groups_per_batch, self.dialog_turns_per_batch = groups_per_batch, dialog_turns_per_batch
        self.yield_completed_trajectories = yield_completed_trajectories
        self.yield_only_last_steps = yield_only_last_steps
        self.total_dialog_turns, self.postproc = total_dialog_turns, postproc
        self.max_concurrent_rollouts = max_concurrent_rollouts
        self.weight_sync_senders = dict(weight_sync_senders or {})
        self._stepper = EnvStepper(self.env, timeout_seconds=step_timeout_seconds, keep_steps=groups_per_batch is None)
        self._player = RolloutPlayer(self._stepper, self.policy, limits=limits or RolloutLimits())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llmrl-collector", daemon=True)
        self._thread.start()
        self._num_turns, self._num_empty_batches = 0, 0
        self._left_over: list[TensorDictBase] = []
        self.report: CollectionReport | None = None
        """What the last batch's collection did."""
        self.rollouts: list[Rollout] = []
        """Records of the last batch's rollouts, dropped ones included."""

    def __iter__(self) -> Iterator[TensorDictBase]:
        while self.total_dialog_turns < 0 or self._num_turns < self.total_dialog_turns:
            try:
                batch = self._next_batch()
            except EndOfData:
                return
            if batch is not None:
                yield batch if self.postproc is None else self.postproc(batch)

    def _next_batch(self) -> TensorDictBase | None:
        if self.groups_per_batch is not None:
            return self._collect_groups(self.groups_per_batch)
        if self.yield_completed_trajectories:
            steps = self._collect_steps(1)
            return lazy_stack(steps, 0) if steps else None
        wanted = self.dialog_turns_per_batch or 1
        while len(self._left_over) < wanted:
            steps = self._collect_steps(wanted - len(self._left_over))
            self._left_over += steps[-1:] if self.yield_only_last_steps else steps
        batch, self._left_over = self._left_over[:wanted], self._left_over[wanted:]
        if not self.yield_only_last_steps:
            # Turns that wait for the next batch are not in this one's budget.
            self._num_turns += wanted
        return lazy_stack(batch, 0)

    def _collect_groups(self, num_groups: int) -> TensorDictBase | None:
        if self._dataset_env is None:
            raise ValueError("groups_per_batch needs a DatasetChatEnv, whose repeats give the size of a group.")
        rollouts = self.play(num_groups * self._dataset_env.prompts.num_samples)
        batch = batch_rows(rollouts)
        self._num_empty_batches = 0 if batch is not None else self._num_empty_batches + 1
        if self._num_empty_batches:
            assert self.report is not None
            errors = [rollout.error for rollout in rollouts if rollout.error]
            why = f"rollouts dropped by reason: {self.report.num_dropped_by_reason}"
            why += f"; the first error: {errors[0]}" if errors else ""
            logger.warning("nothing to train on in this batch; %s", why)
            if self._num_empty_batches >= MAX_EMPTY_BATCHES:
                raise CollectionStalled(f"{MAX_EMPTY_BATCHES} batches in a row had nothing to train on; {why}.")
        return batch

    def _collect_steps(self, num_turns: int) -> list[TensorDictBase]:
        # Conversations are played one batch of rollouts at a time; a rollout gives at least one turn or fails.
        count = 1 if self.yield_completed_trajectories or self.yield_only_last_steps else num_turns
        return [step for rollout in self.play(count) for step in rollout.steps]

    def play(self, num_rollouts: int) -> list[Rollout]:
        """Play the next so many rollouts to their ends; also fills `report` and `rollouts`.

        Raises:
            EndOfData: when the dataset ends before the first of them.
        """
        started = time.perf_counter()
        future = asyncio.run_coroutine_threadsafe(self._play(num_rollouts), self._loop)
        try:
            self.rollouts = future.result()
        except BaseException:
            future.cancel()
            raise
        if self.dialog_turns_per_batch is None or self.yield_only_last_steps:
            self._num_turns += sum(rollout.num_turns for rollout in self.rollouts)
        self.report = CollectionReport.of(self.rollouts, seconds=time.perf_counter() - started)
        return self.rollouts

    async def _play(self, num_rollouts: int) -> list[Rollout]:
        elements = await self._stepper.reset(num_rollouts)
        slots = asyncio.Semaphore(self.max_concurrent_rollouts or num_rollouts)

        async def play(element: TensorDictBase) -> Rollout:
            async with slots:
                return await self._player.play(element)

        rollouts = list(await asyncio.gather(*map(play, elements)))
        rubric = self._player.rubric
        if rubric is not None and rubric.is_group_scored:
            await self._score_groups(rollouts)
        return rollouts

    async def _score_groups(self, rollouts: list[Rollout]) -> None:
        """Score each group together, once all its rollouts have settled; a failure drops the group from training."""
        rubric = self._player.rubric
        assert rubric is not None
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)
        for group in groups.values():
            failed = [r for r in group if r.status in (RolloutStatus.ERROR, RolloutStatus.ABORTED)]
            scores = [rubric.failed("a rollout of its group failed")] * len(group)
            if not failed:
                scores = await rubric.score_group([as_scored(rollout) for rollout in group])
            for rollout, score in zip(group, scores, strict=True):
                rollout.reward, rollout.breakdown, rollout.is_scored = score.reward, score.breakdown, score.is_scored
                rollout.error = rollout.error or score.error

    def update_policy_weights_(self) -> int:
        """Send the trainer's weights to the engines; the new policy version.

        Raises:
            ValueError: without a weight-sync sender.
        """
        if not self.weight_sync_senders:
            raise ValueError("update_policy_weights_ needs weight_sync_senders={'policy': sender}.")
        return max(sender.update_weights() for sender in self.weight_sync_senders.values())

    @property
    def policy_version(self) -> int:
        """Version of the weights that the next rollout starts with."""
        return self.policy.engine.policy_version

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue the very same sequence of prompts and ids."""
        state: dict[str, Any] = {"num_turns": self._num_turns}
        if self._dataset_env is not None:
            state["env"] = self._dataset_env.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._num_turns = state["num_turns"]
        if self._dataset_env is not None:
            self._dataset_env.load_state_dict(state["env"])

    def shutdown(self) -> None:
        """End the collector's threads. The engine is its owner's to shut down."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=10)
            self._loop.close()
        self._stepper.shutdown()

    def __enter__(self) -> LLMCollector:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.shutdown()


def _dataset_env(env: EnvBase) -> DatasetChatEnv | None:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env if isinstance(env, DatasetChatEnv) else None
