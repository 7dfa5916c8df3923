"""Selection of rollouts, variants of the advantage, a KL in the reward."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import Table
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.objectives import GRPOLoss, KLPenalty, MCAdvantage, MCAdvantageSelector, TopKRewardSelector, group_advantages


def _row(group: str, rollout: int, reward: float, **breakdown: float) -> TensorDict:
    return TensorDict(
        {
            "tokens": {"full": torch.arange(3)},
            "next": {"reward": torch.full((1, 1), reward)},
            "reward_breakdown": {name: torch.tensor([value]) for name, value in breakdown.items()},
            "rollout": {
                "group_id": NonTensorData(group),
                "rollout_id": NonTensorData(f"{group}/{rollout}"),
                "is_scored": torch.tensor(not math.isnan(reward)),
            },
        }
    )


def _batch(*rows: TensorDict) -> TensorDictBase:
    return lazy_stack(list(rows), 0)


def _values(batch: TensorDictBase, *key: str) -> list[float]:
    return [float(row[key]) for row in batch.unbind(0)]


def test_batch_normalized_advantages_are_those_of_reinforce_plus_plus() -> None:
    rewards = {"a": [0.0, 1.0, 1.0], "b": [2.0, 2.0, 5.0]}
    rows = [_row(g, i, r) for g, group in rewards.items() for i, r in enumerate(group)]
    everything = torch.tensor([r for group in rewards.values() for r in group])
    plain = MCAdvantage(normalization="none", normalize_batch=True)(_batch(*(r.clone() for r in rows)))
    expected = (everything - everything.mean()) / everything.std()
    assert _values(plain, "advantage") == pytest.approx(expected.tolist(), rel=1e-5)
    centred = torch.cat([torch.tensor(group) - torch.tensor(group).mean() for group in rewards.values()])
    baseline = MCAdvantage(normalization="mean", normalize_batch=True)(_batch(*rows))
    expected = (centred - centred.mean()) / centred.std()
    assert _values(baseline, "advantage") == pytest.approx(expected.tolist(), rel=1e-5)


def test_groups_without_signal_stay_in_the_mean_and_deviation_of_the_batch() -> None:
    rewards = {"a": [0.0, 1.0, 1.0], "b": [1.0, 1.0, 1.0], "c": [0.0, 0.0, 0.0], "d": [0.0, 0.0, 4.0]}
    centred = [reward - sum(group) / 3 for group in rewards.values() for reward in group]
    deviation = math.sqrt(sum(value**2 for value in centred) / (len(centred) - 1))
    for drop in (True, False):
        rows = [_row(g, i, r) for g, group in rewards.items() for i, r in enumerate(group)]
        advantage = MCAdvantage(normalization="mean", normalize_batch=True, drop_constant_groups=drop)
        expected = [value / deviation for value in centred if value or not drop]
        assert _values(advantage(_batch(*rows)), "advantage") == pytest.approx(expected, abs=1e-6)
        assert advantage.constant_groups == 2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalization", ["none", "mean"])
def test_reinforce_plus_plus_charges_each_token_with_the_kl_that_is_to_come(normalization: Any, seed: int) -> None:
    """arXiv:2501.03262, equations 8 to 10; a rollout that was forked into rows is one sequence of tokens."""
    generator = torch.Generator().manual_seed(seed)
    rewards = {"a/0": 1.0, "a/1": 1.0, "b/0": 0.0, "b/1": 3.0}
    rows, tokens = [], []
    for name in ("a/0", "b/0", "a/1", "a/0", "b/1", "a/0"):
        length = int(torch.randint(2, 7, (), generator=generator))
        mask = torch.rand(length, generator=generator) < 0.7
        mask[1] = True
        log_probs, reference = -3 * torch.rand(2, length, generator=generator)
        row = {
            "log_probs": {"full": log_probs},
            "next": {"reward": torch.full((1, 1), rewards[name]), "ref_log_probs": {"full": reference}},
            "masks": {"all_assistant_mask": mask},
            "rollout": {"rollout_id": NonTensorData(name), "group_id": NonTensorData(name[0])},
        }
        for place in mask.nonzero()[:, 0].tolist():
            tokens.append((name, len(rows), place, (log_probs[place] - reference[place]).item()))
        rows.append(TensorDict(row))
    baselines = {"a": 1.0, "b": 1.5} if normalization == "mean" else {"a": 0.0, "b": 0.0}
    values = []
    for index, (name, *_) in enumerate(tokens):
        to_go = sum(token[3] for token in tokens[index:] if token[0] == name)
        values.append(rewards[name] - baselines[name[0]] - 0.2 * to_go)
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    advantage = MCAdvantage(normalization=normalization, normalize_batch=True, kl_penalty=KLPenalty(0.2))
    batch = advantage(_batch(*rows))
    assert batch.shape == (6,) and _values(batch, "next", "reward") == [
        rewards[row["rollout", "rollout_id"]] for row in rows
    ]
    for value, (_, row, place, _) in zip(values, tokens, strict=True):
        assert batch[row]["advantage"][place].item() == pytest.approx((value - mean) / deviation, rel=1e-4, abs=1e-5)
    # The loss takes one number per token.
    for row in batch.unbind(0):
        row["tokens", "full"] = torch.zeros(len(row["log_probs", "full"]), dtype=torch.int64)
    policy = Table(torch.cat([row["log_probs", "full"] for row in batch.unbind(0)]))
    (gradient,) = torch.autograd.grad(GRPOLoss(policy)(batch).loss_objective, policy.log_probs)
    mask = torch.cat([row["masks", "all_assistant_mask"] & (torch.arange(len(row["advantage"])) > 0) for row in rows])
    wanted = torch.cat([row["advantage"] for row in batch.unbind(0)])
    torch.testing.assert_close(gradient[mask], -wanted[mask] / mask.sum())


def test_a_kl_is_charged_once() -> None:
    row = _row("a", 0, 1.0)
    row["log_probs"] = {"full": torch.zeros(3)}
    row["next", "ref_log_probs"] = {"full": torch.ones(3)}
    row["masks"] = {"all_assistant_mask": torch.ones(3, dtype=torch.bool)}
    penalty = KLPenalty(0.1)
    advantage = MCAdvantage(normalization="none", normalize_batch=True, kl_penalty=penalty)
    with pytest.raises(ValueError, match="not both"):
        advantage(penalty(_batch(row)))


def test_batch_normalization_is_refused_where_there_is_no_whole_batch() -> None:
    with pytest.raises(ValueError, match="needs whole batches"):
        MCAdvantage(grpo_size=1, normalize_batch=True).inv(_batch(_row("a", 0, 1.0)))


def test_constant_groups_have_signal_where_the_baseline_is_the_batch() -> None:
    rows = [_row("a", 0, 1.0), _row("a", 1, 1.0), _row("b", 0, 0.0), _row("b", 1, 0.0)]
    batch = MCAdvantage(normalization="none", normalize_batch=True)(_batch(*rows))
    assert len(_values(batch, "advantage")) == 4 and sum(_values(batch, "advantage")) == pytest.approx(0, abs=1e-6)


def test_components_are_normalized_each_by_itself_and_then_weighted() -> None:
    """Two components of very different scale; by their sum alone the small one would be lost."""
    correct, short = [0.0, 100.0, 0.0, 100.0], [1.0, 0.0, 0.0, 1.0]
    rows = [_row("g", i, c + s, correct=c, short=s) for i, (c, s) in enumerate(zip(correct, short, strict=True))]
    batch = MCAdvantage(component_weights={"correct": 1.0, "short": 0.5})(_batch(*rows))
    parts = zip(group_advantages(correct), group_advantages(short), strict=True)
    assert _values(batch, "advantage") == pytest.approx([c + 0.5 * s for c, s in parts], rel=1e-5)
    assert len(set(_values(batch, "advantage"))) == 4


def test_a_component_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match="shrot"):
        MCAdvantage(component_weights={"shrot": 1.0})(
            _batch(_row("g", 0, 1.0, short=1.0), _row("g", 1, 0.0, short=0.0))
        )


@settings(max_examples=60)
@given(st.lists(st.floats(-5, 5, width=16), min_size=2, max_size=8), st.data())
def test_max_variance_finds_the_best_of_all_subsets(returns: list[float], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(returns)))
    chosen = MCAdvantageSelector("max_variance").select(returns, group_size=size)

    def variance(subset: Any) -> float:
        values = torch.tensor([returns[i] for i in subset], dtype=torch.float64)
        return float((values - values.mean()).square().sum())

    assert chosen is not None and len(set(chosen)) == size and chosen == sorted(chosen)
    assert variance(chosen) == pytest.approx(max(map(variance, combinations(range(len(returns)), size))), abs=1e-9)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("first", [0, 1, 2, 3]), ("uniform", [0, 2, 5, 7]), ("balanced", [0, 2, 5, 7]), ("max_variance", [0, 1, 6, 7])],
)
def test_strategies(strategy: Any, expected: list[int]) -> None:
    returns = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9, 1.0]
    assert MCAdvantageSelector(strategy).select(returns, group_size=4) == expected
    assert MCAdvantageSelector(strategy).select(returns, group_size=4, keep_return_bounds=(2.0, 3.0)) is None


@pytest.mark.usefixtures("takes_long")
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=2, max_size=7), st.data())
def test_selections_are_torchrls(returns: list[float], data: st.DataObject) -> None:
    from torchrl.objectives.llm import MCAdvantageSelector as Theirs

    size = data.draw(st.integers(1, len(returns)))
    bounds = data.draw(st.sampled_from([None, (0.1, 0.9), (0.3, 0.6)]))
    for strategy in ("first", "uniform", "balanced"):
        candidates = TensorDict({"return": torch.tensor(returns)}, batch_size=[len(returns)])
        ours, theirs = (
            one(strategy).select(candidates, group_size=size, keep_return_bounds=bounds)  # type: ignore[arg-type]
            for one in (MCAdvantageSelector, Theirs)
        )
        assert (ours, theirs) == (None, None) or ours == sorted(theirs)


def test_balanced_selection_rescues_a_group_that_is_nearly_all_failures() -> None:
    returns = [0.0] * 7 + [1.0]
    chosen = MCAdvantageSelector("balanced").select(returns, group_size=4, keep_return_bounds=(0.1, 0.9))
    assert chosen is not None and 7 in chosen
    assert MCAdvantageSelector("first").select(returns, group_size=4, keep_return_bounds=(0.1, 0.9)) is None


def test_of_more_candidates_the_chosen_are_trained_on() -> None:
    transform = MCAdvantage(
        2,
        candidate_group_size=4,
        candidate_selection_min_size=4,
        candidate_selector=MCAdvantageSelector("max_variance"),
        normalization="mean",
    )
    assert transform.inv(_batch(_row("g", 0, 0.4), _row("g", 1, 0.0), _row("g", 2, 1.0))) is None
    complete = transform.inv(_batch(_row("g", 3, 0.6)))
    assert _values(complete, "next", "reward") == [0.0, 1.0]
    assert _values(complete, "advantage") == [-0.5, 0.5]


def test_groups_out_of_bounds_are_dropped_and_counted() -> None:
    transform = MCAdvantage(keep_return_bounds=(0.2, 0.8), drop_constant_groups=False)
    rows = [_row("hard", 0, 0.0), _row("hard", 1, 0.1), _row("good", 0, 0.0), _row("good", 1, 1.0)]
    assert _values(transform(_batch(*rows)), "next", "reward") == [0.0, 1.0]
    assert transform.dropped_groups == 1


def test_top_k_keeps_the_best_above_the_mean_of_each_group() -> None:
    rows = [_row("a", i, r) for i, r in enumerate([0.0, 3.0, 1.0, 2.0])]
    rows += [_row("b", i, r) for i, r in enumerate([1.0, 1.0, 1.0, 0.0])]
    rows += [_row("same", i, 1.0) for i in range(4)]
    rows += [_row("half", i, r) for i, r in enumerate([math.nan, 1.0, 0.0, math.nan])]
    selected = TopKRewardSelector(4, 2).select(_batch(*rows))
    kept = [row["rollout", "rollout_id"] for row in selected.unbind(0)]
    assert kept == ["a/1", "a/3", "b/0", "b/1", "half/1"]


def test_top_k_keeps_all_rows_of_a_rollout() -> None:
    rows = [_row("a", 0, 1.0), _row("a", 1, 0.0), _row("a", 0, 1.0)]
    assert _values(TopKRewardSelector(2, 1).select(_batch(*rows)), "next", "reward") == [1.0, 1.0]


def test_top_k_writes_complete_groups_to_a_replay_buffer_and_leaves_samples_alone() -> None:
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=2)
    buffer.append_transform(TopKRewardSelector(3, 2))
    buffer.extend(_batch(_row("a", 0, 0.0), _row("b", 0, 1.0), _row("a", 1, 2.0)))
    assert len(buffer) == 0
    buffer.extend(_batch(_row("a", 2, 3.0)))
    assert len(buffer) == 2
    assert {float(r["next", "reward"]) for r in buffer.sample().unbind(0)} <= {2.0, 3.0}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_penalty_is_the_kl_of_the_whole_rollout_off_every_row(estimator: Any) -> None:
    def row(rollout: str, gap: list[float], mask: list[int]) -> TensorDict:
        return TensorDict(
            {
                "log_probs": {"full": torch.full((len(gap),), -1.0)},
                "next": {"reward": torch.ones(1, 1), "ref_log_probs": {"full": torch.tensor(gap) - 1.0}},
                "masks": {"all_assistant_mask": torch.tensor(mask, dtype=torch.bool)},
                "rollout": {"rollout_id": NonTensorData(rollout)},
            }
        )

    batch = _batch(row("a", [9.0, 0.5, -0.5], [0, 1, 1]), row("b", [9.0, 0.0], [0, 1]), row("a", [9.0, 1.0], [0, 1]))

    def one(gap: float) -> float:
        return {"k1": -gap, "k2": gap**2 / 2, "k3": math.exp(gap) - 1 - gap}[estimator]

    expected = 1 - 0.1 * (one(0.5) + one(-0.5) + one(1.0))
    penalty = KLPenalty(0.1, estimator=estimator)
    assert _values(penalty(batch), "next", "reward") == pytest.approx([expected, 1.0, expected], rel=1e-5)
    assert _values(penalty(batch), "next", "reward") == pytest.approx([expected, 1.0, expected], rel=1e-5)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: MCAdvantage(4, candidate_group_size=3), "candidate_group_size"),
        (lambda: MCAdvantage(candidate_group_size=3), "candidate_group_size"),
        (lambda: MCAdvantage(keep_return_bounds=(1.0, 0.0)), "keep_return_bounds"),
        (lambda: MCAdvantage(component_weights={}), "component_weights"),
        (lambda: MCAdvantage(kl_penalty=KLPenalty(0.1)), "normalize_batch=True"),
        (lambda: MCAdvantageSelector("best"), "strategy"),  # type: ignore[arg-type]
        (lambda: TopKRewardSelector(2, 3), "topk_size"),
        (lambda: KLPenalty(0.1, estimator="k9"), "estimator"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make()
