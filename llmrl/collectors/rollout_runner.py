"""Loop that plays one rollout: generate and step until it has settled, within all limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tensordict import TensorDictBase

from llmrl._utils.arguments import check_least, check_positive
from llmrl._utils.failure import as_exception, describe, traceback_of
from llmrl._utils.numbers import finite_number, location_of
from llmrl._utils.replaceable_loop import ReplaceableLoop
from llmrl._utils.spans import here, span
from llmrl.collectors.agents import AgentEndpoint
from llmrl.collectors.completing import Completer
from llmrl.collectors.concurrency import TurnCounts
from llmrl.collectors.scheduler import RolloutTask
from llmrl.data import Rollout, RolloutStatus, StopReason, decide_status
from llmrl.data.message import copied
from llmrl.data.tensordicts import dataset_columns, non_tensor, plain
from llmrl.endpoint import SessionLimits
from llmrl.endpoint.agent import AgentTimeout
from llmrl.engines import Completion
from llmrl.envs import AgentEnv
from llmrl.envs.agent import with_answer_rewards
from llmrl.envs.stepper import EnvStepper
from llmrl.policies import LLMWrapperBase, answered
from llmrl.rendering import Conversation
from llmrl.rewards import RewardInput, Rubric
from llmrl.rewards.rubric import scores_of
from llmrl.transforms import environment_parts, outcomes_of, states_of, write_score

_GRACE_SECONDS = 1.0
"""Seconds from a rubric's own time limit, which names the late function, to its end."""
# A rollout that was not opened has nothing to score: neither an answer nor the state of tools.
_UNOPENED = "The time limit of the rollout expired while its environment opened it."


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits that may end a rollout; ValueError if one is below its minimum."""

    max_turns: int | None = None
    """Maximum number of completions."""
    max_completion_tokens: int | None = None
    """Maximum number of sampled tokens, over all turns."""
    max_prompt_tokens: int | None = None
    """Maximum prompt length; by default the engine's context length minus one token."""
    end_at_length: bool = True
    """Whether an answer cut by its token budget ends the rollout; TorchRL continues."""
    rollout_timeout_seconds: float | None = None
    """Maximum wall time of a rollout, including waiting."""
    step_timeout_seconds: float | None = None
    """Maximum time of one environment step, including its tools."""
    num_engine_retries: int = 2
    """Number of retries of a failed engine request, each under a new id."""

    def __post_init__(self) -> None:
        check_least(
            1,
            max_turns=self.max_turns,
            max_completion_tokens=self.max_completion_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        check_least(0, num_engine_retries=self.num_engine_retries)
        check_positive(
            rollout_timeout_seconds=self.rollout_timeout_seconds, step_timeout_seconds=self.step_timeout_seconds
        )


class RolloutRunner:
    """Plays rollouts of one environment with one policy. Turns wait while `is_open` is cleared."""

    def __init__(
        self,
        stepper: EnvStepper,
        policy: LLMWrapperBase,
        *,
        rubric: Rubric | None,
        limits: RolloutLimits,
        is_open: asyncio.Event | None = None,
    ) -> None:
        self.stepper = stepper
        self.policy = policy
        self.limits = limits
        make_completer = partial(Completer, num_retries=limits.num_engine_retries, is_open=is_open)
        self.completer = make_completer(policy)
        self.turn_counts = TurnCounts()
        """Counts of turns; a reader replaces this object to start new counts."""
        self.judge_loop = ReplaceableLoop("llmrl-judges")
        """Event loop of the judges."""
        self.rubric = rubric
        longest = policy.engine.max_model_len - 1
        self.max_prompt_tokens = min(limits.max_prompt_tokens or longest, longest)
        self._agent_env = next((part for part in environment_parts(stepper.env) if isinstance(part, AgentEnv)), None)
        if self._agent_env is not None:
            session_limits = SessionLimits(
                max_prompt_tokens=self.max_prompt_tokens,
                max_turns=limits.max_turns,
                max_completion_tokens=limits.max_completion_tokens,
            )
            self._endpoint = AgentEndpoint(policy, session_limits, self._agent_env, make_completer)

    async def run(self, job: RolloutTask) -> Rollout:
        """Play one conversation to its end; errors of the conversation are recorded, not raised.

        The record in `job` is filled during the conversation. The payload of `job` is the opening
        (`Opening`), which is removed once it is opened, to free its tensors.
        """
        [rollout] = job.records
        with span("invoke_agent", rollout.env) as current:
            await self._run(job, rollout)
            if current is not None:
                names = {"llmrl.group_id": rollout.group_id, "llmrl.status": rollout.status.name.lower()}
                counts = {"llmrl.num_turns": rollout.num_turns, "llmrl.reward": rollout.reward}
                current.set_attributes({"gen_ai.conversation.id": rollout.rollout_id, **names, **counts})
                if rollout.error:
                    current.set_attribute("error.type", rollout.error.partition(":")[0])
        return rollout

    async def _run(self, job: RolloutTask, rollout: Rollout) -> None:
        started = asyncio.get_running_loop().time()
        held: list[TensorDictBase] = []
        try:
            try:
                async with asyncio.timeout(self.limits.rollout_timeout_seconds) as limit:
                    await self._open_and_play(job, rollout, held)
            except (asyncio.CancelledError, GeneratorExit):
                raise
            except BaseException as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    self._end(rollout, StopReason.TIMEOUT, "" if held else _UNOPENED)
                else:
                    self._end(rollout, StopReason.ENGINE_ERROR, as_exception(error))
            for element in held:
                rollout.tool_calls = outcomes_of(element)
                rollout.tool_states = states_of(element)
            if rollout.conversation is not None:
                counts = rollout.conversation.count_turns()
                rollout.num_forks = counts["num_forked_turns"]
                rollout.num_realigned_tokens = counts["num_realigned_tokens"]
            await self._score_at_end(rollout)  # before the release: a judge may read the state of tools
        finally:
            for element in held:
                await self.stepper.release(element)
        _refuse_reward(rollout)
        rollout.seconds = asyncio.get_running_loop().time() - started

    async def _open_and_play(self, job: RolloutTask, rollout: Rollout, held: list[TensorDictBase]) -> None:
        is_open = False
        try:
            await self._open(job, rollout, held)
            is_open = not rollout.status.is_settled
        finally:
            if not is_open and self._agent_env is not None:
                self._endpoint.skip(rollout)
        if not is_open:
            return
        if self._agent_env is not None:
            await self._play_agent(self._agent_env, rollout, held)
        else:
            await self._play(rollout, held)

    async def _open(self, job: RolloutTask, rollout: Rollout, held: list[TensorDictBase]) -> None:
        opening = job.payload
        job.payload = None
        try:
            element = await self.stepper.open(opening)
        except Exception as error:
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
        held.append(element)
        if not isinstance(opening, TensorDictBase):
            rollout.columns = dataset_columns(element)  # now with columns that the environment's parts added
        if _is_any(element.get("done")):  # the game ended before this player's turn
            rollout.status = decide_status(is_terminated=True)
            rollout.add_reward(float(element.get("reward", torch.zeros(1)).sum()))

    async def _play_agent(self, agent_env: AgentEnv, rollout: Rollout, held: list[TensorDictBase]) -> None:
        """Run an agent, which leads the conversation, and end it with one step with its score."""
        [element] = held
        row = copied({name: rollout.columns.get(name) for name in agent_env.columns})
        play, session = await self._endpoint.play(rollout, partial(agent_env.run_agent, row))
        if play.failure is not None:  # the agent's result may lack the answer that the engine did not give
            return self._end(rollout, StopReason.ENGINE_ERROR, play.failure)
        if play.scores is None:
            # If the agent failed because a limit refused it an answer, that limit is the reason.
            if play.refusal:
                return self._end(rollout, play.refusal)
            if isinstance(play.error, AgentTimeout):
                return self._end(rollout, StopReason.TIMEOUT)
            error = as_exception(play.error or RuntimeError("the agent returned no result."))
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
        score = play.scores[rollout.role]
        rewards = session.replies.rewards_in(session.tree)
        score = with_answer_rewards(score, sum(rewards.values()) if rewards else None)
        self._endpoint.write_last(element, session, role=rollout.role, is_read=self.stepper.are_turns_read)
        agent_env.end_with(element, score)
        rollout.reason = session.reason or score.reason  # a limit refused answers, and the agent continued
        element.set(("rollout", "reason"), non_tensor(str(rollout.reason)))
        try:
            stepped, element = await self.stepper.step(element)
        except Exception as error:
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
        held[:] = [element]
        self._settle(rollout, stepped)
        for place, reward in rewards.items():  # moved from the last turn, to which the score was added
            rollout.turn_rewards[-1] -= reward
            rollout.turn_rewards[place] += reward
        parents = session.tree.parents()
        if rewards and parents != list(range(-1, len(parents) - 1)):
            rollout.turn_parents = parents

    async def _play(self, rollout: Rollout, held: list[TensorDictBase]) -> None:
        while not rollout.status.is_settled:
            with span("turn"):
                await self._play_turn(rollout, held)  # a call, so its locals are freed after each turn

    async def _play_turn(self, rollout: Rollout, held: list[TensorDictBase]) -> None:
        [element] = held
        try:
            conversation = self.policy.prepare(element)
        except Exception as error:
            # The template refuses messages that the environment appended.
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
        rollout.conversation = conversation
        rollout.messages = conversation.messages
        if conversation.num_tokens > self.max_prompt_tokens:
            return self._end(rollout, StopReason.PROMPT_TOO_LONG)
        completion = await self._complete(conversation.prompt_ids, rollout)
        self.turn_counts.count(completion, conversation.num_kept_tokens if rollout.num_turns else None)
        conversation = answered(conversation, completion)
        self.policy.write_turn(element, conversation, completion, is_read=self.stepper.are_turns_read)
        if self.stepper.keep_steps:
            self.policy.write_text(element)
        self._count_turn(conversation, completion, rollout)
        element.set(("rollout", "reason"), non_tensor(str(rollout.reason)))
        if parent := here():
            element.set(("rollout", "traceparent"), non_tensor(parent))
        try:
            stepped, element = await self.stepper.step(element)
        except Exception as error:
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error)
        step = stepped.get("next")
        if error_text := plain(step.get("env_error", None)):
            rollout.traceback = plain(step.get("env_traceback"))
            return self._end(rollout, StopReason.ENVIRONMENT_ERROR, error_text)
        held[:] = [element]
        reward = step.get("reward")
        num_tokens = len(completion.token_ids)
        if reward.numel() >= num_tokens > 1:
            rollout.token_rewards[rollout.num_turns - 1] = reward.flatten()[-num_tokens:].tolist()
        self._settle(rollout, stepped)

    async def _complete(self, prompt_ids: list[int], rollout: Rollout) -> Completion:
        sampling = self.policy.sampling
        limit = self.limits.max_completion_tokens
        if limit is not None and (left := limit - rollout.num_completion_tokens) < sampling.max_new_tokens:
            sampling = sampling.with_changes(max_new_tokens=left)
        name = f"{rollout.rollout_id}/{rollout.num_turns}"
        return await self.completer.complete(prompt_ids, sampling, name=name, routing_key=rollout.group_id)

    def _count_turn(self, conversation: Conversation, completion: Completion, rollout: Rollout) -> None:
        rollout.num_turns += 1
        rollout.conversation = conversation
        rollout.messages = conversation.messages
        rollout.num_completion_tokens += len(completion.token_ids)
        limit = self.limits.max_completion_tokens
        if completion.finish_reason == "length" and self.limits.end_at_length:
            rollout.reason = StopReason.LENGTH
        elif completion.finish_reason == "abort":
            rollout.reason = StopReason.ABORTED
        elif limit is not None and rollout.num_completion_tokens >= limit:
            rollout.reason = StopReason.LENGTH
        elif self.limits.max_turns is not None and rollout.num_turns >= self.limits.max_turns:
            rollout.reason = StopReason.MAX_TURNS

    def _settle(self, rollout: Rollout, stepped: TensorDictBase) -> None:
        step = dict(stepped.get("next").items())  # a dict is ten times faster to read
        if self.policy.input_mode == "history":
            rollout.messages = step["history"].get("prompt").chats
        is_terminated, is_truncated, is_done = (_is_any(step[key]) for key in ("terminated", "truncated", "done"))
        is_terminated |= is_done and not is_truncated  # an environment may set `done` alone
        if not rollout.reason and not is_terminated and is_truncated:
            rollout.reason = StopReason.ENVIRONMENT_TRUNCATED
        rollout.status = decide_status(is_terminated=is_terminated, reason=rollout.reason)
        reward = step["reward"]
        rollout.add_reward(float(reward if reward.numel() == 1 else reward.sum()))
        rollout.info |= plain(step.get("env_info")) or {}
        if self.rubric is not None or self._agent_env is not None:
            rollout.is_scored = _is_any(step["is_scored"])
            rollout.error = plain(step["score_error"])
            rollout.breakdown = {
                key: float(value) for key, value in step["reward_breakdown"].items() if not value.isnan().any()
            }
        if rollout.status is RolloutStatus.COMPLETED:
            rollout.reason = StopReason.NONE
        elif rollout.status.is_settled:
            _mark_truncated(stepped.get("next"))
        if self.stepper.keep_steps:
            rollout.steps.append(stepped)

    async def _score_at_end(self, rollout: Rollout) -> None:
        if self.rubric is None:  # the environment or the agent gives the reward
            is_rewarded = self._agent_env is None or rollout.is_scored
            rollout.is_scored = rollout.status.is_success and not rollout.error and is_rewarded
            return
        is_scoring_failed = rollout.status.is_success and bool(rollout.error)
        if not (rollout.is_scored or is_scoring_failed or self.rubric.is_group_scored):
            await self.score([rollout])

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Score ended rollouts that no step has scored; group rubrics need a whole group."""
        assert self.rubric is not None
        limit = self.rubric.timeout_seconds
        try:
            scoring = scores_of(self.rubric, [_reward_input(rollout) for rollout in rollouts])
            scores = await self.judge_loop.wait(scoring, limit and limit + _GRACE_SECONDS)
        except Exception as error:
            text = describe(error)
            if self.rubric.is_group_scored:
                text += f"; score_group ({location_of(self.rubric.score_group, error)})"
            elif isinstance(error, TimeoutError):
                text += f"; {self.rubric.located()}"
            scores = [self.rubric.failed(text)] * len(rollouts)
        for rollout, score in zip(rollouts, scores, strict=True):
            rollout.add_reward(score.reward)
            rollout.breakdown |= score.breakdown
            rollout.is_scored = score.is_scored
            rollout.error = rollout.error or score.error
            _refuse_reward(rollout)
            if rollout.steps:
                write_score(rollout.steps[-1].get("next"), score, self.rubric.names)

    @staticmethod
    def _end(rollout: Rollout, reason: str, error: BaseException | str = "") -> None:
        """End a rollout between two steps, and keep its results so far."""
        rollout.reason = reason
        rollout.status = decide_status(is_terminated=False, reason=reason)
        rollout.error = error if isinstance(error, str) else describe(error)
        if isinstance(error, BaseException):
            rollout.traceback = traceback_of(error)
        rollout.is_scored = False
        if rollout.steps:
            _mark_truncated(rollout.steps[-1].get("next"))


def _is_any(flags: torch.Tensor) -> bool:
    # Most flags have one entry. A tensor operation releases the GIL, which another thread may then take.
    return bool(flags if flags.numel() == 1 else flags.any())


def _mark_truncated(step: TensorDictBase) -> None:
    for key in ("truncated", "done"):
        step.set(key, torch.ones(1, dtype=torch.bool))


def _refuse_reward(rollout: Rollout) -> None:
    """Mark a rollout as not scored if its reward is not finite."""
    try:
        rollout.reward = finite_number(
            rollout.reward, "reward of the rollout, as its environment and transforms wrote it,"
        )
    except ValueError as error:
        if rollout.is_scored:
            rollout.reward = 0.0
            rollout.is_scored = False
            rollout.error = rollout.error or f"ValueError: {error}"


def _reward_input(rollout: Rollout) -> RewardInput:
    messages = copied(rollout.messages)
    columns = copied(rollout.columns)
    is_answered = rollout.num_turns > 0
    return RewardInput(messages, columns, rollout.status, rollout.reason, rollout.tool_states, is_answered)
