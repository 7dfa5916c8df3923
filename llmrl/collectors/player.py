"""Plays one rollout: generate, step, until it is settled. Every limit is enforced here and nowhere else."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass

import torch
from tensordict import NonTensorData, TensorDictBase

from llmrl.collectors.stepper import EnvStepper
from llmrl.data import Rollout, RolloutStatus, StopReason, decide_status
from llmrl.data.tensordicts import plain
from llmrl.engines import EngineError
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric, ScoredRollout
from llmrl.transforms import dataset_columns, find_rubric_reward

_SOLO_IDS = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What may end a rollout before its environment does.

    Raises:
        ValueError: for a limit below its minimum, naming it.
    """

    max_turns: int | None = None
    """Completions a rollout may have."""
    max_prompt_tokens: int | None = None
    """Longest prompt; by default what leaves one token of the engine's context."""
    rollout_timeout_seconds: float | None = None
    """Wall time of a rollout, waiting included."""
    num_engine_retries: int = 2
    """How often a failed engine request is tried again, under a new id."""

    def __post_init__(self) -> None:
        for name, least in (("max_turns", 1), ("max_prompt_tokens", 1), ("num_engine_retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}.")


class RolloutPlayer:
    """Plays rollouts of one environment with one policy.

    Args:
        stepper: the environment, stepped in batches.
        policy: generates.
        limits: what may end a rollout early.
        keep_steps: whether a rollout keeps one TensorDict a turn.
    """

    def __init__(
        self, stepper: EnvStepper, policy: LLMWrapperBase, *, limits: RolloutLimits, keep_steps: bool = False
    ) -> None:
        self.stepper, self.policy, self.limits, self.keep_steps = stepper, policy, limits, keep_steps
        rubric_reward = find_rubric_reward(stepper.env)
        self.rubric: Rubric | None = None if rubric_reward is None else rubric_reward.rubric
        self.max_prompt_tokens = min(
            limits.max_prompt_tokens or policy.engine.max_model_len - 1, policy.engine.max_model_len - 1
        )

    async def play(self, element: TensorDictBase) -> Rollout:
        """Play one conversation from its reset (`element`, batch shape `[]`) to its end; never raises for its sake."""
        group_id = plain(element.get(("rollout", "group_id"), None)) or f"solo/{next(_SOLO_IDS)}"
        sample_index = int(element.get(("rollout", "sample_index"), torch.tensor(0)))
        rollout = Rollout(
            rollout_id=f"{group_id}/{sample_index}",
            group_id=group_id,
            sample_index=sample_index,
            group_size=int(element.get(("rollout", "group_size"), torch.tensor(1))),
            columns=dataset_columns(element),
        )
        started = time.perf_counter()
        try:
            async with asyncio.timeout(self.limits.rollout_timeout_seconds):
                await self._play(element, rollout)
        except TimeoutError:
            self._end(rollout, StopReason.TIMEOUT)
        except Exception as error:
            self._end(rollout, StopReason.ENGINE_ERROR, error)
        finally:
            await self.stepper.release(element)
        rollout.seconds = time.perf_counter() - started
        await self._score_unscored(rollout)
        return rollout

    async def _play(self, element: TensorDictBase, rollout: Rollout) -> None:
        while True:
            try:
                conversation = self.policy.prepare(element)
            except Exception as error:
                # A template that refuses the messages which the environment appended.
                return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
            rollout.conversation, rollout.messages = conversation, conversation.messages
            if conversation.num_tokens > self.max_prompt_tokens:
                return self._end(rollout, StopReason.PROMPT_TOO_LONG)
            element.set("conversation", NonTensorData(conversation))
            element = await self._generate(element, rollout)
            element.set(("rollout", "reason"), NonTensorData(rollout.reason))
            try:
                stepped, root = await self.stepper.step(element)
            except Exception as error:
                return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
            error_text = plain(stepped.get(("next", "env_error"), ""))
            if error_text:
                return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error_text)
            if self._settle(rollout, stepped):
                return None
            element = root

    async def _generate(self, element: TensorDictBase, rollout: Rollout) -> TensorDictBase:
        for attempt in range(self.limits.num_engine_retries + 1):
            request_id = f"{rollout.rollout_id}/{rollout.num_turns}/{attempt}"
            try:
                element = await self.policy.generate(element, request_id=request_id, routing_key=rollout.group_id)
                break
            except EngineError:
                if attempt == self.limits.num_engine_retries:
                    raise
        rollout.num_turns += 1
        conversation = plain(element.get("conversation"))
        rollout.conversation, rollout.messages = conversation, conversation.messages
        rollout.num_completion_tokens += conversation.node.num_completion_tokens
        finish_reason = plain(element.get("finish_reason"))
        if finish_reason == "length":
            rollout.reason = StopReason.LENGTH
        elif finish_reason == "abort":
            rollout.reason = StopReason.ABORTED
        elif self.limits.max_turns is not None and rollout.num_turns >= self.limits.max_turns:
            rollout.reason = StopReason.MAX_TURNS
        return element

    def _settle(self, rollout: Rollout, stepped: TensorDictBase) -> bool:
        """Take over what the step gave; true when the rollout has ended."""
        step = stepped.get("next")
        if self.policy.input_mode == "history":
            rollout.messages = step.get(("history", "prompt")).chats
        is_terminated = bool(step.get("terminated").any())
        if not rollout.reason and not is_terminated and bool(step.get("truncated").any()):
            rollout.reason = StopReason.ENVIRONMENT_TRUNCATED
        rollout.status = decide_status(is_terminated=is_terminated, reason=rollout.reason)
        rollout.reward += float(step.get("reward").sum())
        if self.rubric is not None and bool(step.get("is_scored").any()):
            rollout.is_scored = True
            rollout.breakdown = {
                key: float(value) for key, value in step.get("reward_breakdown").items() if not value.isnan().any()
            }
        elif self.rubric is not None:
            rollout.error = plain(step.get("score_error"))
        if rollout.status is RolloutStatus.COMPLETED:
            rollout.reason = StopReason.NONE
        elif rollout.status.is_settled:
            step.set("truncated", torch.ones(1, dtype=torch.bool))
            step.set("done", torch.ones(1, dtype=torch.bool))
        if self.keep_steps:
            rollout.steps.append(stepped)
        return rollout.status.is_settled

    async def _score_unscored(self, rollout: Rollout) -> None:
        """Score a rollout that ended where no step could: a limit before its first turn, a time-out, a failure."""
        if self.rubric is None:
            rollout.is_scored = rollout.status.is_success  # its reward is what its environment gave
            return
        is_scoring_failed = rollout.status.is_success and bool(rollout.error)
        if rollout.is_scored or is_scoring_failed or self.rubric.is_group_scored:
            return
        score = await self.rubric.score(as_scored(rollout))
        rollout.reward += score.reward
        rollout.breakdown, rollout.is_scored = score.breakdown, score.is_scored
        rollout.error = rollout.error or score.error

    @staticmethod
    def _end(rollout: Rollout, reason: str, error: BaseException | str = "") -> None:
        """End a rollout between two steps, with what it had."""
        rollout.reason = reason
        rollout.status = decide_status(is_terminated=False, reason=reason)
        rollout.error = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        rollout.is_scored = False


def as_scored(rollout: Rollout) -> ScoredRollout:
    """The rollout as reward functions see it."""
    return ScoredRollout(rollout.messages, rollout.columns, rollout.status, rollout.reason)
