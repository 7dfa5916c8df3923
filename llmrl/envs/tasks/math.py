"""MATH: competition mathematics (Hendrycks et al. 2021, https://arxiv.org/abs/2103.03874)."""

from __future__ import annotations

import asyncio
from typing import Unpack

from llmrl._utils.imports import require
from llmrl.envs.tasks.answer_reward import AnswerReward
from llmrl.envs.tasks.task import Dataset, Split, TaskEnv, TaskOptions, task_rows
from llmrl.rewards import boxed_answer, extract_answer, is_math_right

HUB_NAME = "DigitalLearningGmbH/MATH-lighteval"
_SYSTEM_PROMPT = "Solve the problem. Write the final answer in LaTeX, as \\boxed{answer}."


class MATHRewardParser(AnswerReward):
    r"""Rewards an answer that math-verify finds equal to the reference, awaited off the batch; see `AnswerReward`.

    Args:
        format_reward, correct_reward, set_done_if_answer: see `AnswerReward`.
        reasoning: whether the answer stands inside `<answer>` tags; else in the last `\boxed{…}` or line.

    Example:
        >>> MATHRewardParser().rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    def __init__(
        self,
        *,
        format_reward: float = 0.1,
        correct_reward: float = 1.0,
        set_done_if_answer: bool = True,
        reasoning: bool = True,
    ) -> None:
        require("math_verify", extra="envs")  # here, where it stops a run, and not at each score

        async def is_right(completion: str, answer: str) -> bool:
            return await asyncio.to_thread(is_math_right, completion, answer, reasoning=reasoning)

        def has_answer(completion: str) -> bool:
            given = extract_answer(completion, reasoning=reasoning)
            return given is not None and (reasoning or boxed_answer(given) is not None)

        super().__init__(
            is_right,
            has_answer,
            format_reward=format_reward,
            correct_reward=correct_reward,
            set_done_if_answer=set_done_if_answer,
        )


class MATHEnv(TaskEnv):
    r"""Competition problems with expressions as answers.

    Args:
        dataset: hub name, local file or rows, with columns `problem` and `solution` (its last `\boxed{…}` is the
            answer), or `problem` and `answer`.
        split, reasoning, **options: see `GSM8KEnv`.

    Raises:
        ValueError: for an empty dataset, a missing column, or a solution without a boxed answer.

    Example:
        >>> MATHEnv([{"problem": "Half of one?", "solution": r"It is $\boxed{\frac{1}{2}}$."}]).reset()[0]["answer"]
        '\\frac{1}{2}'
    """

    def __init__(
        self,
        dataset: Dataset = HUB_NAME,
        *,
        split: Split = "train",
        reasoning: bool = True,
        **options: Unpack[TaskOptions],
    ) -> None:
        rows = task_rows(dataset, split=split, query="problem")
        for index, row in enumerate(rows):
            if row.get("answer") is None:
                row["answer"] = boxed_answer(row.get("solution") or "")
            if row["answer"] is None:
                raise ValueError(f"row {index} of dataset has no 'answer', and no \\boxed{{…}} in its 'solution'.")
        super().__init__(
            rows,
            system_prompt=_SYSTEM_PROMPT,
            reward=MATHRewardParser(reasoning=reasoning),
            reasoning=reasoning,
            options={"name": split, **options},
        )


def make_math_env(
    split: Split = "train", *, data: Dataset | None = None, reasoning: bool = True, **options: Unpack[TaskOptions]
) -> MATHEnv:
    """Make a `MATHEnv` over a local copy, or over the hub's.

    Example:
        >>> make_math_env("test", data=[{"problem": "1 + 1?", "answer": "2"}]).reset()[0]["rollout", "group_id"]
        'test/0/0'
    """
    return MATHEnv(HUB_NAME if data is None else data, split=split, reasoning=reasoning, **options)
