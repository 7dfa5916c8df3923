"""MATH: competition mathematics (Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874)."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from llmrl._utils.imports import require
from llmrl.envs.tasks.answer_reward import AnswerReward
from llmrl.envs.tasks.task import DeclaredTaskEnv, Rows, Task, named_task
from llmrl.rewards import boxed_answer, extract_answer, is_math_right


class MATHRewardParser(AnswerReward):
    r"""A reward for an answer that math-verify finds equal to the reference; see `AnswerReward`.

    Without `reasoning`, the answer is the last `\boxed{…}`, or else the last line.
    MissingExtraError is raised if math-verify is not installed.

    Example:
        >>> MATHRewardParser().rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    @functools.wraps(AnswerReward.__init__)  # type: ignore[misc]  # preserves the signature
    def __init__(self, **options: Any) -> None:
        require("math_verify", extra="envs")  # fails at construction, not at each score
        super().__init__(**options)

    async def is_right(self, completion: str, answer: str) -> bool:
        """Return whether the answer equals the reference."""
        return await asyncio.to_thread(is_math_right, completion, answer, reasoning=self.reasoning)

    def has_answer(self, completion: str) -> bool:
        """Return whether there is an answer, in tags or boxed."""
        given = extract_answer(completion, reasoning=self.reasoning)
        return given is not None and (self.reasoning or boxed_answer(given) is not None)


def _read_answers(rows: Rows) -> None:
    for index, row in enumerate(rows):
        if row.get("answer") is None:
            row["answer"] = boxed_answer(row.get("solution") or "")
        if row["answer"] is None:
            raise ValueError(f"row {index} of dataset has no 'answer', and no \\boxed{{…}} in its 'solution'.")


class MATHEnv(DeclaredTaskEnv):
    r"""Competition problems with expressions as answers; see `DeclaredTaskEnv` for the arguments.

    A custom dataset has the columns `problem` and `answer`, or `problem` and `solution` with a final `\boxed{…}`.

    Example:
        >>> MATHEnv([{"problem": "Half of one?", "solution": r"It is $\boxed{\frac{1}{2}}$."}]).reset()[0]["answer"]
        '\\frac{1}{2}'
    """

    task = Task(
        source="DigitalLearningGmbH/MATH-lighteval",
        query="problem",
        columns=(),
        complete_rows=_read_answers,
        system_prompt="Solve the problem. Write the final answer in LaTeX, as \\boxed{answer}.",
        reward=MATHRewardParser,
    )


make_math_env = named_task("math", "competition mathematics")(MATHEnv.make)
