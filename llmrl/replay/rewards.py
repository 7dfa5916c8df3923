"""Rewards and advantages of recorded rollouts, computed again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from llmrl._utils.asynchronous import run_sync
from llmrl._utils.imports import own_function
from llmrl.data import RolloutStatus
from llmrl.envs.tasks.registry import TASKS, load_function
from llmrl.objectives.advantages.normalization import Normalization, group_advantages
from llmrl.replay.recorded import RecordedRun
from llmrl.rewards import RewardFn, RewardInput, Rubric
from llmrl.rewards.rubric import Score, scores_of
from llmrl.runs.setup import make_env
from llmrl.transforms import find_rubric_rewards, joint_rubric
from llmrl.viewer.run_data import Record


def own_rubric(reward: str) -> Rubric:
    """Return the rubric of a reward function `FILE.py:FUNCTION`. Executes the file.

    Raises FileNotFoundError or ValueError if the file or the function does not exist, or if the file raises an error.
    """
    if (own := own_function(reward)) is None:
        raise ValueError(f"reward must be FILE.py:FUNCTION, got {reward!r}.")
    try:
        function = cast("Callable[..., float]", load_function(*own))
    except (FileNotFoundError, ValueError):
        raise
    except Exception as error:  # a user's file may raise any error, such as a failed import
        raise ValueError(f"{own[0]} raises {type(error).__name__} when it is executed: {error}.") from error
    return Rubric(RewardFn(function, name=own[1]))


def rubric_of(run: RecordedRun) -> Rubric | None:
    """Return the rubric of a recorded run's task; None for an environment of the user."""
    env = run.entries.get("env")
    if not isinstance(env, Mapping) or env.get("name") not in TASKS:
        return None  # the environment is in a file that the run's folder only names
    return joint_rubric(find_rubric_rewards(make_env(run.config())))


def score_again(rubric: Rubric, records: Sequence[Record]) -> list[Score]:
    """Score recorded rollouts by a rubric, in the same order; states of tools are not recorded."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, record in enumerate(records):
        groups[record["group_id"] if rubric.is_group_scored else record["rollout_id"]].append(place)

    async def score() -> list[Score]:
        scores: dict[int, Score] = {}
        for places in groups.values():
            given = await scores_of(rubric, [reward_input(records[place]) for place in places])
            scores |= zip(places, given, strict=True)
        return [scores[place] for place in range(len(records))]

    return run_sync(score())


def reward_input(record: Record) -> RewardInput:
    """Return a reward function's input from a record. Raises ValueError for an unknown status.

    Example:
        >>> record = {"messages": [{"role": "assistant", "content": "4"}], "columns": {"answer": "4"}, "num_turns": 1,
        ...           "status": "completed", "reason": ""}
        >>> reward_input(record).completion
        '4'
    """
    status = record["status"].upper()
    if status not in RolloutStatus.__members__:
        raise ValueError(f"rollout {record['rollout_id']} has the unknown status {record['status']!r:.80}.")
    return RewardInput(
        tuple(record["messages"]),
        cast("dict[str, object]", record.get("columns") or {}),
        RolloutStatus[status],
        record["reason"],
        is_answered=bool(record.get("num_turns", 1)),
    )


def group_of(record: Record) -> tuple[str, str]:
    """Return what the rollouts compared with one share: its group and its role in a game.

    Example:
        >>> group_of({"group_id": "g", "role": "first"}), group_of({"group_id": "g"})
        (('g', 'first'), ('g', ''))
    """
    return record["group_id"], record.get("role", "")


def advantages_of(
    records: Sequence[Record],
    normalization: Normalization,
    rewards: Mapping[str, float] | None = None,
    *,
    by_role: bool = True,
) -> dict[str, float]:
    """Return the advantage of each scored rollout within its group, by rollout id.

    Args:
        rewards: new rewards by rollout id, which replace the recorded ones; a rollout without one counts as not scored.
        by_role: whether a rollout is compared only with those of its group in the same role, as in the GRPO script.

    Example:
        >>> records = [{"rollout_id": name, "group_id": "g", "reward": reward, "is_scored": True}
        ...            for name, reward in (("a", 1.0), ("b", 0.0))]
        >>> advantages_of(records, "mean"), advantages_of(records, "mean", {"a": 0.0, "b": 4.0})
        ({'a': 0.5, 'b': -0.5}, {'a': -2.0, 'b': 2.0})
    """
    if rewards is None:
        rewards = {record["rollout_id"]: record["reward"] for record in records if record.get("is_scored", True)}
    groups: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for record in records:
        group = group_of(record) if by_role else (record["group_id"], "")
        name = record["rollout_id"]
        if name in rewards:
            groups[group][name] = rewards[name]
    return {
        name: advantage
        for group in groups.values()
        for name, advantage in zip(group, group_advantages(list(group.values()), normalization), strict=True)
    }
