"""`RubricReward`: ends answered conversations and scores them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import cast

import torch
from tensordict import TensorDictBase
from torchrl.data import Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, Transform

from llmrl._utils.arguments import KnownArguments
from llmrl._utils.asynchronous import run_sync
from llmrl.data import Message, StopReason, decide_status
from llmrl.data.message import copied
from llmrl.data.tensordicts import batch_elements, dataset_columns, non_tensor, plain, restacked, tensordict_of
from llmrl.rewards import ROLLOUT_INPUTS, RewardFn, RewardInput, Rubric, Score, UnknownRewardInput
from llmrl.rewards.rubric import JointRubric, scores_of
from llmrl.tools import ToolTransform, states_of
from llmrl.transforms.parts import environment_around, environment_parts, refuse_early_readers


class RubricReward(KnownArguments, Transform):
    """Scores a conversation with a `Rubric` when it ends.

    A conversation ends when the environment is done, when it reaches a limit (`("rollout", "reason")`, which a
    collector writes before the step), or, with `terminate_when_answered`, when its last message is
    an assistant message. Append this transform after those that answer the policy.

    The score is added to `("next", "reward")` `[1, 1]`. Also written are `("next", "reward_breakdown", NAME)` `[1]`
    (NaN if not scored), `("next", "is_scored")` `[1]` and `("next", "score_error")`. The scores of
    several `RubricReward`s are summed; if one fails, the rollout is not scored. With a collector,
    the collector runs async and group rubrics (`Rubric.is_left_to_collectors`).

    Args:
        terminate_when_answered: whether an assistant message without a reply terminates the conversation.

    Raises:
        UnknownRewardInput: when appended to a dataset's environment, if a reward function has an unknown parameter.
        ValueError: when appended after a `RubricReward` with a reward function of the same name, or
            after a TorchRL transform that reads the reward before any transform writes it.

    Example:
        >>> from tensordict import TensorDict
        >>> from llmrl.envs import ChatEnv
        >>> from llmrl.data import ChatHistory
        >>> env = ChatEnv().append_transform(RubricReward(RewardFn(lambda completion: len(completion), name="length")))
        >>> data = env.reset(TensorDict({"query": "7 + 8 ="}))
        >>> full = data["history"].prompt.append({"role": "assistant", "content": "15"})
        >>> data["history"] = ChatHistory(full=full, batch_size=())
        >>> data = env.step(data)
        >>> data["next", "reward"].item(), data["next", "terminated"].item()
        (2.0, True)
    """

    writes_reward = True

    def __init__(
        self,
        rubric: Rubric | RewardFn | Callable[..., float | Awaitable[float]],
        *,
        terminate_when_answered: bool = True,
    ) -> None:
        super().__init__()
        self.rubric = rubric if isinstance(rubric, Rubric) else Rubric(rubric)
        self.terminate_when_answered = terminate_when_answered

    def set_container(self, container: Transform | EnvBase) -> None:
        """Join an environment and check that it provides the inputs of the reward functions."""
        super().set_container(container)
        self._check_names()
        refuse_early_readers(self)
        self.check_inputs()

    def _environment_parts(self) -> list[EnvBase | Transform]:
        env = environment_around(self)
        return [] if env is None else environment_parts(env)

    def _rewards(self) -> list[RubricReward]:
        """Return the `RubricReward`s of the environment, in order."""
        return [part for part in self._environment_parts() if isinstance(part, RubricReward)]

    def _earlier(self) -> list[RubricReward]:
        """Return the `RubricReward`s before this one, in order."""
        return list(itertools.takewhile(lambda part: part is not self, self._rewards()))

    def _check_names(self) -> None:
        # TorchRL's `insert_transform` copies a transform, which then has the same rubric.
        joint_rubric([*(other for other in self._rewards() if other.rubric is not self.rubric), self])

    def check_inputs(self) -> None:
        """Raise UnknownRewardInput if a reward function has inputs that are known to be missing."""
        parts = self._environment_parts()
        columns = [part.columns for part in parts if hasattr(part, "columns")]
        if not columns:  # columns are known only at reset
            return
        states = [part.state_names for part in parts if isinstance(part, ToolTransform)]
        available = {*ROLLOUT_INPUTS, *itertools.chain.from_iterable([*columns, *states])}
        try:
            self.rubric.check_inputs(available)
        except UnknownRewardInput:
            parent = self.parent  # its specs have the outputs of earlier transforms
            assert parent is not None
            for spec in (parent.state_spec, parent.observation_spec):
                available |= {key for key, entry in spec.items() if isinstance(entry, NonTensor)}
            self.rubric.check_inputs(available)

    def check_order(self) -> None:
        """Raise ValueError if a tool comes after this transform, which ends the conversation."""
        later = itertools.dropwhile(lambda part: part is not self, self._environment_parts())
        late = [name for part in later if isinstance(part, ToolTransform) for name in part.tools]
        if late and self.terminate_when_answered:
            raise ValueError(
                f"the tools {late} are appended after RubricReward, which ends a conversation before they answer: "
                "append them before it."
            )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_elements = batch_elements(next_tensordict)
        ended: list[tuple[TensorDictBase, Rubric]] = []
        scoring: list[Coroutine[None, None, list[Score]]] = []
        for element, next_element in zip(batch_elements(tensordict), next_elements, strict=True):
            rollout = self._settle(element, next_element)
            if rollout is None or (rubric := self._pending_rubric(next_element)).is_group_scored:
                write_score(next_element, None, self.rubric.names)
                continue
            ended.append((next_element, rubric))
            scoring.append(scores_of(rubric, [rollout], parent=plain(element.get(("rollout", "traceparent"), ""))))
        for (next_element, rubric), [score] in zip(ended, _gathered(scoring), strict=True):
            write_score(next_element, score, rubric.names)
        return restacked(next_elements, next_tensordict.batch_size)

    def _pending_rubric(self, next_element: TensorDictBase) -> Rubric:
        """Return the rubric of an ended conversation, with earlier ones that have not scored it."""
        is_scored = next_element.get("is_scored", None)
        if is_scored is None or is_scored.any() or plain(next_element.get("score_error")):
            return self.rubric
        return cast("Rubric", joint_rubric([*self._earlier(), self]))

    def _settle(self, element: TensorDictBase, next_element: TensorDictBase) -> RewardInput | None:
        messages = self._messages(element, next_element)
        reason_of_collector = element.get(("rollout", "reason"), None)
        reason = plain(reason_of_collector) or StopReason.NONE
        is_terminated = bool(next_element.get("terminated").any())
        # A cut answer truncates the conversation and does not terminate it. The same holds if the
        # environment truncates it because requests of an agent were refused.
        is_truncated = bool(next_element.get("truncated").any())
        is_cut = reason in (StopReason.LENGTH, StopReason.ABORTED) or (bool(reason) and is_truncated)
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        if not (is_terminated or is_cut) and self.terminate_when_answered and is_answered:
            is_terminated = True
            for key in ("terminated", "done"):
                next_element.set(key, torch.ones(1, dtype=torch.bool))
        if not reason and not is_terminated and is_truncated:
            reason = StopReason.ENVIRONMENT_TRUNCATED
        status = decide_status(is_terminated=is_terminated, reason=reason)
        if not status.is_settled or (reason_of_collector is not None and self._is_left_to_collectors()):
            return None
        columns = copied(dataset_columns(element))
        return RewardInput(copied(messages), columns, status, reason, states_of(element))

    def _messages(self, element: TensorDictBase, next_element: TensorDictBase) -> tuple[Message, ...]:
        history = next_element.get(("history", "prompt"), None)
        if history is not None:
            return cast("tuple[Message, ...]", history.chats)
        return cast("tuple[Message, ...]", self._environment_parts()[0].answered_messages(element))

    def _is_left_to_collectors(self) -> bool:
        return any(reward.rubric.is_left_to_collectors for reward in self._rewards())

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Add the reward breakdown, the flag `is_scored` and the error."""
        shape = reward_spec.shape
        names = {name: Unbounded((*shape, 1)) for part in [*self._earlier(), self] for name in part.rubric.names}
        reward_spec["reward_breakdown"] = Composite(names, shape=shape)
        reward_spec["is_scored"] = Categorical(2, shape=(*shape, 1), dtype=torch.bool)
        reward_spec["score_error"] = NonTensor(shape=tuple(shape), example_data="")
        return reward_spec


def _gathered(scoring: Sequence[Coroutine[None, None, list[Score]]]) -> list[list[Score]]:
    async def gather() -> list[list[Score]]:
        return await asyncio.gather(*scoring)

    return run_sync(gather()) if scoring else []


def write_score(next_element: TensorDictBase, score: Score | None, names: Sequence[str]) -> None:
    """Add a score (None: not scored yet) to those in the `next` entries of a conversation."""
    error = plain(next_element.get("score_error", ""))
    is_failed = bool(error) and not next_element.get("is_scored").any()  # an earlier score failed
    is_scored = False
    raw: dict[str, float] = {}
    if score is not None:
        # The score is added to the environment's reward; if that is dense, to the last token's.
        reward = next_element.get("reward").clone()
        reward[-1] += score.reward
        next_element.set("reward", reward)
        raw = score.breakdown
        is_scored = score.is_scored and not is_failed
        error = error or score.error
    breakdown = {name: torch.tensor([raw.get(name, float("nan"))]) for name in names}
    earlier = next_element.get("reward_breakdown", {})
    next_element.set("reward_breakdown", tensordict_of({**dict(earlier.items()), **breakdown}))
    next_element.set("is_scored", torch.tensor([is_scored]))
    next_element.set("score_error", non_tensor(error))


def joint_rubric(rewards: Sequence[RubricReward]) -> Rubric | None:
    """Return one rubric for all rewards, or None; raise ValueError for duplicate names."""
    rubrics = [reward.rubric for reward in rewards]
    return JointRubric(rubrics) if len(rubrics) > 1 else next(iter(rubrics), None)


def find_rubric_rewards(env: EnvBase) -> list[RubricReward]:
    """Return the `RubricReward`s among an environment's transforms, in order."""
    return [part for part in environment_parts(env) if isinstance(part, RubricReward)]
