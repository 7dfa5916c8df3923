"""GSM8K: grade-school math word problems (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168)."""

from __future__ import annotations

from typing import Unpack

from llmrl._utils.arguments import keywords_of, refuse_unknown
from llmrl.envs.tasks.answer_reward import AnswerReward
from llmrl.envs.tasks.task import Dataset, DeclaredTaskEnv, Split, Task, TaskOptions, named_task
from llmrl.rewards import has_gsm8k_answer, is_gsm8k_right


class GSM8KRewardParser(AnswerReward):
    """Rewards the correct number; see `AnswerReward`. Without `reasoning`, the last number is the answer.

    Example:
        >>> GSM8KRewardParser().rubric.names
        ['reward_right', 'reward_answer', 'reward_think', 'success']
    """

    def is_right(self, completion: str, answer: str) -> bool:
        """Return whether the answer's last number equals the reference."""
        return is_gsm8k_right(completion, answer, reasoning=self.reasoning)

    def has_answer(self, completion: str) -> bool:
        """Return whether there is an answer, in tags or as a number."""
        return has_gsm8k_answer(completion, reasoning=self.reasoning)


class GSM8KEnv(DeclaredTaskEnv):
    """Grade-school math word problems, rewarded by `GSM8KRewardParser`; see `DeclaredTaskEnv` for the arguments.

    The hub's dataset has 7,473 training and 1,319 test problems. A custom dataset has the columns
    `question` and `answer`, which ends with `#### NUMBER`.

    Example:
        >>> row = {"question": "Tom has 2 boxes of 6 eggs. How many eggs?", "answer": "2 * 6 = 12 #### 12"}
        >>> GSM8KEnv([row], repeats=4).reset()[0]["history"].prompt.content[-1]
        'Tom has 2 boxes of 6 eggs. How many eggs?'
    """

    task = Task(
        source="openai/gsm8k",
        subset="main",
        query="question",
        system_prompt="The answer is a number: end with it.",
        reward=GSM8KRewardParser,
    )


@named_task("gsm8k", "word problems of grade-school mathematics")
def make_gsm8k_env(
    split: Split = "train", *, data: Dataset | None = None, reasoning: bool = True, **options: Unpack[TaskOptions]
) -> GSM8KEnv:
    """Make a `GSM8KEnv` over the hub's dataset or `data`, with one turn unless `max_steps` is given.

    Example:
        >>> row = {"question": "Tom has 2 boxes of 6 eggs. How many eggs?", "answer": "2 * 6 = 12 #### 12"}
        >>> make_gsm8k_env("test", data=[row]).reset()[0]["rollout", "group_id"]
        'test/0/0'
    """
    refuse_unknown("make_gsm8k_env", options, keywords_of(make_gsm8k_env) or ())
    return GSM8KEnv(data, split=split, reasoning=reasoning, **{"max_steps": 1, **options})
