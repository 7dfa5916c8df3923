"""IFEval: verifiable instructions (Zhou et al. 2023, https://arxiv.org/abs/2311.07911)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llmrl._utils.arguments import keywords_of
from llmrl._utils.types import Row
from llmrl.data import RolloutStatus
from llmrl.envs.tasks.task import DeclaredTaskEnv, Rows, Task, named_task
from llmrl.rewards import (
    IFEvalScoreData,
    RewardFn,
    Rubric,
    check_instructions,
    extract_answer,
    extract_tags,
    score_instructions,
)
from llmrl.transforms import RubricReward

Kwargs = Sequence[Row | None]


class IfEvalScorer(RubricReward):
    """A reward for followed instructions: the weighted mean of the four IFEval accuracies, which are the breakdown.

    Args:
        format_weights: weights of `prompt_level_strict_acc`, `inst_level_strict_acc`,
            `prompt_level_loose_acc` and `inst_level_loose_acc`.
        aggregate_reward: True for the weighted mean, or a function that returns the reward (`"aggregate"` in the
            breakdown) from an `IFEvalScoreData` and, if it has such parameters, `think_blocks` and `answer_blocks`
            (contents of these tags) and `complete` (whether the rollout was completed).
        set_done_if_answer, reasoning: see `AnswerReward`.

    Raises ValueError unless there are four weights, and if `aggregate_reward` is false.

    Example:
        >>> IfEvalScorer().rubric.names[0]
        'prompt_level_strict_acc'
    """

    def __init__(
        self,
        *,
        format_weights: Sequence[float] | None = None,
        aggregate_reward: bool | Callable[..., float] = True,
        set_done_if_answer: bool = True,
        reasoning: bool = True,
    ) -> None:
        weights = _WEIGHTS if format_weights is None else tuple(format_weights)
        if len(weights) != len(_SHARES):
            raise ValueError(f"format_weights must be {len(_SHARES)} numbers, one for each of {list(_SHARES)}.")
        if not aggregate_reward:
            raise ValueError(
                "aggregate_reward must be true or a function: there is one reward, and the shares are in its breakdown."
            )

        def followed(completion: str, instruction_id_list: list[str], kwargs: Kwargs) -> IFEvalScoreData:
            answer = extract_answer(completion, reasoning=reasoning) or ""
            return score_instructions(answer, instruction_id_list, kwargs)

        def scorer(share: Callable[[IFEvalScoreData], float]) -> Callable[..., float]:
            def score(completion: str, instruction_id_list: list[str], kwargs: Kwargs) -> float:
                return share(followed(completion, instruction_id_list, kwargs))

            return score

        functions = [
            RewardFn(scorer(share), name=name, weight=0 if callable(aggregate_reward) else weight)
            for (name, share), weight in zip(_SHARES.items(), weights, strict=True)
        ]
        if callable(aggregate_reward):
            aggregate = aggregate_reward
            declared = keywords_of(aggregate_reward)

            def aggregated(
                completion: str, instruction_id_list: list[str], kwargs: Kwargs, status: RolloutStatus
            ) -> float:
                blocks = {f"{tag}_blocks": extract_tags(completion, tag) for tag in ("think", "answer")}
                extras = {**blocks, "complete": status is RolloutStatus.COMPLETED}
                chosen = {name: extras[name] for name in extras if declared is None or name in declared}
                return float(aggregate(followed(completion, instruction_id_list, kwargs), **chosen))

            functions.append(RewardFn(aggregated, name="aggregate"))
        super().__init__(Rubric(*functions, truncation_reward=0.0), terminate_when_answered=set_done_if_answer)
        self.format_weights = weights
        self.reasoning = reasoning


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / max(len(values), 1)


_SHARES: dict[str, Callable[[IFEvalScoreData], float]] = {
    "prompt_level_strict_acc": lambda data: float(data.prompt_level_strict_acc),
    "inst_level_strict_acc": lambda data: _mean(data.inst_level_strict_acc),
    "prompt_level_loose_acc": lambda data: float(data.prompt_level_loose_acc),
    "inst_level_loose_acc": lambda data: _mean(data.inst_level_loose_acc),
}
_WEIGHTS = (0.4, 0.3, 0.2, 0.1)


def _check_rows(rows: Rows) -> None:
    for row in rows:
        check_instructions(row["instruction_id_list"], row["kwargs"])


class IFEvalEnv(DeclaredTaskEnv):
    """Prompts with instructions that a program can verify; see `DeclaredTaskEnv` for the arguments.

    The hub's dataset has only the split `train`. A custom dataset has the columns `prompt`, `instruction_id_list` and
    `kwargs`; ValueError is raised for instructions that no checker accepts.

    Example:
        >>> row = {"prompt": "Name a colour.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        >>> IFEvalEnv([row]).reset()[0]["instruction_id_list"]
        ['punctuation:no_comma']
    """

    task = Task(
        source="google/IFEval",
        query="prompt",
        columns=("instruction_id_list", "kwargs"),
        complete_rows=_check_rows,
        reward=IfEvalScorer,
    )


make_ifeval_env = named_task("ifeval", "instructions that a program can check; on the hub it has only the split train")(
    IFEvalEnv.make
)
