"""IFEval: instructions whose following can be verified (Zhou et al. 2023, https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from llmrl.envs.task import Dataset, Split, TaskEnv, TaskOptions, task_rows
from llmrl.rewards import IFEvalScoreData, RewardFn, Rubric, check_instructions, extract_answer, score_instructions
from llmrl.transforms import RubricReward

HUB_NAME = "google/IFEval"
Kwargs = Sequence[Mapping[str, Any] | None]


class IfEvalScorer(RubricReward):
    """Rewards the share of instructions followed: all or each, strictly or loosely, weighed.

    The four shares are the breakdown.

    Args:
        format_weights: of `prompt_level_strict_acc`, `inst_level_strict_acc`, `prompt_level_loose_acc` and
            `inst_level_loose_acc`.
        is_reasoning: whether the answer stands inside `<answer>` tags.

    Example:
        >>> IfEvalScorer().rubric.names[0]
        'prompt_level_strict_acc'
    """

    def __init__(self, *, format_weights: Sequence[float] = (0.4, 0.3, 0.2, 0.1), is_reasoning: bool = True) -> None:
        shares: dict[str, Callable[[IFEvalScoreData], float]] = {
            "prompt_level_strict_acc": lambda data: float(data.prompt_level_strict_acc),
            "inst_level_strict_acc": lambda data: _mean(data.inst_level_strict_acc),
            "prompt_level_loose_acc": lambda data: float(data.prompt_level_loose_acc),
            "inst_level_loose_acc": lambda data: _mean(data.inst_level_loose_acc),
        }
        if len(format_weights) != len(shares):
            raise ValueError(f"format_weights must be {len(shares)} numbers, one for each of {list(shares)}.")

        def scorer(share: Callable[[IFEvalScoreData], float]) -> Callable[..., float]:
            def score(completion: str, instruction_id_list: list[str], kwargs: Kwargs) -> float:
                answer = extract_answer(completion, is_reasoning=is_reasoning) or ""
                return share(score_instructions(answer, instruction_id_list, kwargs))

            return score

        functions = [
            RewardFn(scorer(share), name=name, weight=weight)
            for (name, share), weight in zip(shares.items(), format_weights, strict=True)
        ]
        super().__init__(Rubric(*functions, truncation_reward=0.0))


class IFEvalEnv(TaskEnv):
    """Prompts with instructions that are checked by program.

    Args:
        dataset: hub name, local file or rows, with columns `prompt`, `instruction_id_list` and `kwargs`.
        split, **options: see `GSM8KEnv`.
        is_reasoning: whether thoughts and answer are asked for in tags.

    Raises:
        ValueError: for an empty dataset, a missing column, or an instruction that no checker knows.

    Example:
        >>> row = {"prompt": "Name a colour.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        >>> IFEvalEnv([row]).reset()["instruction_id_list"]
        ['punctuation:no_comma']
    """

    def __init__(
        self,
        dataset: Dataset = HUB_NAME,
        *,
        split: Split = "train",
        is_reasoning: bool = True,
        **options: Unpack[TaskOptions],
    ) -> None:
        rows = task_rows(dataset, split=split, query="prompt", columns=("instruction_id_list", "kwargs"))
        for row in rows:
            check_instructions(row["instruction_id_list"], row["kwargs"])
        super().__init__(
            rows,
            system_prompt=None,
            reward=IfEvalScorer(is_reasoning=is_reasoning),
            is_reasoning=is_reasoning,
            options={"name": split, **options},
        )


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 0.0


def make_ifeval_env(
    split: Split = "train", *, data: Dataset | None = None, is_reasoning: bool = True, **options: Unpack[TaskOptions]
) -> IFEvalEnv:
    """An `IFEvalEnv` over a local copy, or over the hub's, which has only the split `train`.

    Example:
        >>> row = {"prompt": "Name a colour.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        >>> make_ifeval_env(data=[row]).reset()["rollout", "group_id"]
        'train/0/0'
    """
    return IFEvalEnv(HUB_NAME if data is None else data, split=split, is_reasoning=is_reasoning, **options)
