"""`AnswerReward`: base class of rewards for tasks with one correct answer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable

from llmrl.rewards import RewardFn, Rubric, extract_answer, extract_tag
from llmrl.transforms import RubricReward


class AnswerReward(RubricReward):
    """A reward of `correct_reward` for a correct answer, `format_reward` for a wrong one, 0 for a missing or cut one.

    The breakdown contains `reward_right` (the reward) and the unweighted `reward_answer` (whether there is an
    answer), `reward_think` (whether there is a `<think>` block) and `success`. Subclasses define `is_right`, a plain
    or async function of the completion and columns of the dataset, and may override `has_answer`.

    Args:
        set_done_if_answer: whether an answer ends the conversation.
        reasoning: whether the answer is inside `<answer>` tags; otherwise it is the text after `</think>`.

    Example:
        >>> class Exact(AnswerReward):
        ...     def is_right(self, completion, answer):
        ...         return completion == answer
        >>> Exact(reasoning=False).rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    is_right: Callable[..., bool | Awaitable[bool]]

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        set_done_if_answer: bool = True,
        reasoning: bool = True,
    ) -> None:
        def reward(is_right: object, completion: str) -> float:
            return correct_reward if is_right else format_reward * self.has_answer(completion)

        @functools.wraps(self.is_right)
        def reward_right(completion: str, **columns: object) -> float:
            return reward(self.is_right(completion=completion, **columns), completion)

        @functools.wraps(self.is_right)
        async def reward_right_later(completion: str, **columns: object) -> float:
            return reward(await self.is_right(completion=completion, **columns), completion)  # type: ignore[misc]

        def reward_answer(completion: str) -> float:
            return float(self.has_answer(completion))

        def reward_think(completion: str) -> float:
            return float(bool(extract_tag(completion, "think")))

        rewarding = reward_right_later if inspect.iscoroutinefunction(self.is_right) else reward_right
        rubric = Rubric(
            RewardFn(rewarding, name="reward_right"),
            RewardFn(reward_answer, weight=0),
            RewardFn(reward_think, weight=0),
            RewardFn(self.is_right, name="success", weight=0),
            truncation_reward=0.0,
        )
        super().__init__(rubric, terminate_when_answered=set_done_if_answer)
        self.reasoning = reasoning

    def has_answer(self, completion: str) -> bool:
        """Return whether there is an answer, correct or not."""
        return extract_answer(completion, reasoning=self.reasoning) is not None
