"""Advantages per turn: each turn's return-to-go compared with the same turn of the group's other rollouts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean, stdev

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from llmrl.data.ragged import check_entry, has_entry
from llmrl.objectives.advantages.normalization import Normalization, group_advantages

REWARD_KEY: NestedKey = ("turns", "reward")
START_KEY: NestedKey = ("turns", "start")
PARENT_KEY: NestedKey = ("turns", "parent")
TOKEN_REWARD_KEY: NestedKey = ("turns", "token_reward")


def returns_to_go(rewards: Sequence[float], gamma: float, parents: Sequence[int] = ()) -> list[float]:
    """Return the sum of the rewards of each turn and all later ones, discounted by `gamma` per turn.

    `parents` has for each turn the index of the turn before it, or -1. The turns then form a tree: a reward counts for
    its turn and the turns that lead to it, and the last reward, which scores the rollout, for all turns.

    Example:
        >>> returns_to_go([1.0, 0.0, 4.0], 0.5), returns_to_go([0.0, 2.0, 4.0], 0.5, [-1, 0, -1])
        ([2.0, 2.0, 4.0], [2.0, 4.0, 4.0])
    """
    if parents:
        along = [*rewards[:-1], 0.0]
        for place in range(len(parents) - 1, -1, -1):  # children come after their parents
            if parents[place] >= 0:
                along[parents[place]] += gamma * along[place]
        score = returns_to_go([0.0] * (len(rewards) - 1) + [rewards[-1]], gamma)
        return [one + other for one, other in zip(along, score, strict=True)]
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def turns_of(returns: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the returns of each turn in the rollouts that have this turn: `[[1, 3], [2]]` for `[[1, 2], [3]]`."""
    num_turns = max(map(len, returns), default=0)
    return [[one[place] for one in returns if place < len(one)] for place in range(num_turns)]


def turn_advantages(
    returns: Mapping[Hashable, Sequence[float]], normalization: Normalization
) -> dict[Hashable, list[float]]:
    """Return the advantages of the turns of each rollout, from the returns-to-go of a group.

    Example:
        >>> turn_advantages({"a": [2.0, 1.0], "b": [0.0]}, "mean")
        {'a': [1.0, 0.0], 'b': [-1.0]}
    """
    advantages: dict[Hashable, list[float]] = {name: [] for name in returns}
    for place, values in enumerate(turns_of(list(returns.values()))):
        names = [name for name, of_turns in returns.items() if place < len(of_turns)]
        for name, advantage in zip(names, group_advantages(values, normalization), strict=True):
            advantages[name].append(advantage)
    return advantages


def turn_scales(returns: Mapping[Hashable, Sequence[float]], normalization: Normalization) -> list[float]:
    """Return the divisor of each turn's returns, `[num_turns]`; infinity if all returns of a turn are equal.

    Example:
        >>> turn_scales({"a": [2.0, 1.0], "b": [0.0, 1.0]}, "mean")
        [1.0, inf]
    """
    scales: list[float] = []
    for values in turns_of(list(returns.values())):
        scale = 1.0
        if normalization != "none" and max(values) == min(values):
            scale = math.inf
        elif normalization == "std":
            scale = max(stdev(values), 1e-6)
        elif normalization == "relative":
            scale = fmean(values)
        scales.append(scale)
    return scales


def turn_rewards(row: TensorDictBase) -> list[float]:
    """Return the rewards of the turns of a row's rollout, `[num_turns]`; raise KeyError if the row has none."""
    check_entry(row, REWARD_KEY, owner="A row")
    rewards: list[float] = row.get(REWARD_KEY).double().tolist()
    return rewards


def turn_returns(row: TensorDictBase, gamma: float) -> list[float]:
    """Return the returns-to-go of the turns of a row's rollout, `[num_turns]`; raise KeyError without rewards."""
    parents: list[int] = row.get(PARENT_KEY).tolist() if has_entry(row, PARENT_KEY) else []
    return returns_to_go(turn_rewards(row), gamma, parents)


def on_tokens(
    row: TensorDictBase, advantages: Sequence[float], scales: Sequence[float], mask_key: NestedKey
) -> torch.Tensor:
    """Return each turn's advantage at the tokens that it sampled, `[num_tokens]`; 0 elsewhere.

    With dense rewards, the rewards at earlier tokens of the turn, divided by the turn's scale, are subtracted.
    """
    mask = row.get(mask_key).bool()
    starts = row.get(START_KEY)
    here = (starts >= 0).nonzero().flatten()
    order = here[starts[here].argsort()]
    turn = torch.searchsorted(starts[order], torch.arange(len(mask)), right=True) - 1
    place = turn.clamp(min=0)
    values = torch.tensor(advantages)[order][place]
    if has_entry(row, TOKEN_REWARD_KEY):
        given = torch.cat([torch.zeros(1, dtype=torch.float64), row.get(TOKEN_REWARD_KEY).double().cumsum(0)])
        earlier = given[:-1] - given[starts[order]][place]
        values = (values - earlier / torch.tensor(scales)[order][place]).float()
    return torch.where(mask & (turn >= 0), values, 0.0)
