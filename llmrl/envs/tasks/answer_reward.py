"""`AnswerReward`: what the rewards of tasks with one right answer have in common."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable

from llmrl.rewards import RewardFn, Rubric, extract_answer, extract_tag
from llmrl.transforms import RubricReward


class AnswerReward(RubricReward):
    """Rewards the right answer with `correct_reward`, another answer with `format_reward`, none or a cut one with 0.

    The breakdown has `reward_right` (the reward) and, unweighted, `reward_answer` (there is an answer), `reward_think`
    (there are thoughts in tags) and `success`. A task defines `is_right`, plain or async, a function of the completion
    and of columns of the dataset, and `has_answer` if not every text is an answer.

    Args:
        format_reward, correct_reward: see above.
        set_done_if_answer: whether an answer ends the conversation; else something after it has to.
        reasoning: whether the answer stands inside `<answer>` tags; else it is all that follows the thoughts.

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
        """Return whether there is an answer, right or wrong."""
        return extract_answer(completion, reasoning=self.reasoning) is not None
