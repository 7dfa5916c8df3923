"""Metrics of rollouts, in training and evaluation: rewards and their parts, groups, lengths, tool calls."""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev

from llmrl._utils.types import JSON
from llmrl.data import Rollout, StopReason, text_of

_ROUNDING = 1e-6  # rewards are sums of 32-bit numbers
_UNKNOWN = (
    "Rewards are larger than 1, and no reward function is named `success`: which answers are right is not known, and "
    "pass@k, groups_all_right, groups_all_wrong and the lengths of right and wrong answers are left out. Add "
    'RewardFn(is_right, name="success", weight=0) to the rubric; is_right returns 1 for a right answer.'
)


def right_answers(rollouts: Sequence[Rollout]) -> list[bool] | None:
    """Return which of an environment's rollouts have a right answer, or None with a warning if that is unknown.

    If the environment has a reward function named `success`, an answer is right if `success` is at least 1. Otherwise
    an answer is right if the reward is 1, and unknown if any reward is larger. Rollouts without a score are not right.

    Example:
        >>> def answer(reward, **breakdown):
        ...     return Rollout(rollout_id="", group_id="", sample_index=0, group_size=1, is_scored=True, reward=reward,
        ...                    breakdown=breakdown)
        >>> right_answers([answer(1.0), answer(0.5)]), right_answers([answer(10.0, success=0.0), answer(2.0)])
        ([True, False], [False, False])
    """
    declaring = {rollout.env for rollout in rollouts if "success" in rollout.breakdown}
    rights = []
    for rollout in rollouts:
        is_declared = rollout.env in declaring
        if rollout.is_scored and not is_declared and rollout.reward > 1 + _ROUNDING:
            warnings.warn(_UNKNOWN, stacklevel=1)
            return None
        value = rollout.breakdown.get("success", 0.0) if is_declared else rollout.reward
        rights.append(rollout.is_scored and value >= 1 - _ROUNDING)
    return rights


def rollout_records(rollouts: Sequence[Rollout]) -> list[dict[str, JSON]]:
    """Return the records of rollouts (`Rollout.to_record`) with `is_right`: None if unknown or not scored."""
    rights: Sequence[bool | None] = right_answers(rollouts) or [None] * len(rollouts)
    return [
        {**rollout.to_record(), "is_right": right if rollout.is_scored else None}
        for rollout, right in zip(rollouts, rights, strict=True)
    ]


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return metrics of rollouts, named as in `docs/metrics.md`, without those that are undefined.

    Spreads are population standard deviations. Groups are the scored answers to the same prompt, in
    a game those of the same role.

    Example:
        >>> def answer(group_id, reward, num_tokens):
        ...     return Rollout(rollout_id="", group_id=group_id, sample_index=0, group_size=2, reward=reward,
        ...                    breakdown={"exact": reward}, is_scored=True, num_completion_tokens=num_tokens)
        >>> metrics = rollout_metrics([answer("a", 1.0, 5), answer("a", 0.0, 9), answer("b", 0.0, 7)])
        >>> metrics["completion_tokens_max"], metrics["groups_all_wrong"], round(metrics["reward/exact_mean"], 3)
        (9.0, 0.5, 0.333)
    """
    lengths = sorted(rollout.num_completion_tokens for rollout in rollouts)
    if not lengths:
        return {}
    scored = [rollout for rollout in rollouts if rollout.is_scored]
    rights = right_answers(scored)
    metrics = {
        "num_unscored": float(len(rollouts) - len(scored)),
        "cut_share": sum(rollout.reason == StopReason.LENGTH for rollout in rollouts) / len(rollouts),
        # 95th percentile by nearest rank, which is the length of an actual answer.
        "completion_tokens_p95": float(lengths[math.ceil(0.95 * len(lengths)) - 1]),
        "completion_tokens_max": float(lengths[-1]),
        **dict(_reward_metrics(scored)),
        **_tool_metrics(rollouts),
        **_agent_metrics(rollouts),
        **_answer_metrics(rollouts),
    }
    return metrics if rights is None else metrics | dict(_right_metrics(scored, rights))


def metrics_by_env(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return `rollout_metrics` and mean rewards per environment of a `MixedEnv`, as `env/NAME/METRIC`.

    Example:
        >>> rollout = Rollout(rollout_id="", group_id="sums/0/1", sample_index=0, group_size=1, env="sums", reward=1.0,
        ...                   is_scored=True)
        >>> metrics_by_env([rollout])["env/sums/reward_mean"]
        1.0
    """
    of_env: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.env:
            of_env[rollout.env].append(rollout)
    metrics: dict[str, float] = {}
    for name, played in of_env.items():
        scored = [rollout.reward for rollout in played if rollout.is_scored]
        own = {"num_rollouts": float(len(played))}
        if scored:
            own["reward_mean"] = fmean(scored)
        metrics |= {f"env/{name}/{key}": value for key, value in (own | rollout_metrics(played)).items()}
    return metrics


def _right_metrics(scored: Sequence[Rollout], rights: Sequence[bool]) -> Iterator[tuple[str, float]]:
    groups: dict[tuple[str, str], list[bool]] = defaultdict(list)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for rollout, is_right in zip(scored, rights, strict=True):
        groups[rollout.group_id, rollout.role].append(is_right)
        lengths[is_right].append(rollout.num_completion_tokens)
    for name, of_kind in (("right", lengths[True]), ("wrong", lengths[False])):
        if of_kind:
            yield f"completion_tokens_{name}", fmean(of_kind)
    if len(groups) < len(scored):  # some prompt has several answers
        yield "groups_all_right", sum(map(all, groups.values())) / len(groups)
        yield "groups_all_wrong", sum(not any(group) for group in groups.values()) / len(groups)


def _reward_metrics(scored: Sequence[Rollout]) -> Iterator[tuple[str, float]]:
    if not scored:
        return
    yield "reward_std", pstdev(rollout.reward for rollout in scored)
    yield "reward_max", max(rollout.reward for rollout in scored)
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in scored:
        groups[rollout.group_id, rollout.role].append(rollout.reward)
        for name, value in rollout.breakdown.items():
            parts[name].append(value)
    if len(groups) < len(scored):  # some prompt has several answers
        spreads = [pstdev(rewards) for rewards in groups.values()]
        yield "num_groups", float(len(groups))
        yield "reward_group_std", fmean(spreads)
        yield "groups_all_equal", spreads.count(0) / len(groups)
    for name, values in parts.items():
        yield f"reward/{name}_mean", fmean(values)
        yield f"reward/{name}_std", pstdev(values)


def _tool_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    outcomes: Counter[str] = Counter()
    for rollout in rollouts:
        outcomes.update(rollout.tool_calls)
    if not (num_calls := outcomes.total()):
        return {}
    shares = {f"tool_calls/{outcome}": float(count) for outcome, count in outcomes.items()}
    return {"num_tool_calls": float(num_calls), **shares, "tool_failure_share": 1 - outcomes["answered"] / num_calls}


def _agent_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Return the metrics of agents' requests, from rollouts that recorded them."""
    num_answered = num_refused = num_failed = num_lost = num_turns = num_rows = 0
    for rollout in rollouts:
        requests = rollout.info.get("requests")
        if not isinstance(requests, Mapping):
            continue
        num_answered += requests.get("num_answered", 0)
        num_refused += sum(requests.get("refused", {}).values())
        num_failed += requests.get("num_failed", 0)
        num_lost += requests.get("num_lost", 0)
        num_turns += rollout.num_turns
        rows = {turn["row"] for turn in rollout.turns if turn["row"] is not None}
        num_rows += len(rows) or min(1, rollout.num_turns)
    metrics = {}
    if num_requests := num_answered + num_refused + num_failed:
        metrics["agent/refused"] = num_refused / num_requests
    if num_turns + num_lost:
        metrics["agent/lost"] = num_lost / (num_turns + num_lost)
    if num_turns:
        metrics["agent/rows_per_turn"] = num_rows / num_turns
    return metrics


def _answer_metrics(rollouts: Sequence[Rollout]) -> Mapping[str, float]:
    """Return the share of groups that contain the most frequent answer, as a measure of similarity across prompts."""
    answers: dict[str, set[str]] = defaultdict(set)
    for rollout in rollouts:
        said = [message for message in rollout.messages if message["role"] == "assistant"]
        if said and (text := text_of(said[-1].get("content")).strip()):
            answers[rollout.group_id].add(text)
    if len(answers) < 2:
        return {}
    [(_, count)] = Counter(text for texts in answers.values() for text in texts).most_common(1)
    return {"common_answer_share": count / len(answers)}
