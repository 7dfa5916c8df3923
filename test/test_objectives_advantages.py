"""Advantages: by group id, once a rollout, without what was not scored."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.objectives import MCAdvantage, group_advantages


def _row(group: str, rollout: int, reward: float, *, num_tokens: int = 3, is_scored: bool = True) -> TensorDict:
    return TensorDict(
        {
            "tokens": {"full": torch.arange(num_tokens)},
            "next": {"reward": torch.full((1, 1), reward)},
            "rollout": {
                "group_id": NonTensorData(group),
                "rollout_id": NonTensorData(f"{group}/{rollout}"),
                "is_scored": torch.tensor(is_scored),
            },
        }
    )


def _batch(*rows: TensorDict) -> TensorDictBase:
    return lazy_stack(list(rows), 0)


def _advantages(batch: TensorDictBase) -> list[float]:
    return [float(row["advantage"]) for row in batch.unbind(0)]


def test_std_advantages_are_those_of_the_definition() -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 4.0])
    batch = MCAdvantage()(_batch(*(_row("g", i, float(r)) for i, r in enumerate(rewards))))
    assert _advantages(batch) == pytest.approx(((rewards - rewards.mean()) / rewards.std()).tolist(), rel=1e-5)
    assert batch[0]["advantage"].shape == (1, 1)


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=9))
def test_leave_one_out_is_the_reward_minus_the_mean_of_the_others(rewards: list[float]) -> None:
    total, num = sum(rewards), len(rewards)
    expected = [reward - (total - reward) / (num - 1) for reward in rewards]
    if len(set(rewards)) == 1:
        expected = [0.0] * num
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(expected, abs=1e-9)
    assert sum(group_advantages(rewards, "std")) == pytest.approx(0, abs=1e-6)


def test_rows_of_one_rollout_count_once_and_share_its_advantage_undivided() -> None:
    single = MCAdvantage()(_batch(_row("g", 0, 1.0), _row("g", 1, 0.0), _row("g", 2, 0.0)))
    several = MCAdvantage()(
        _batch(
            _row("g", 0, 1.0), _row("g", 1, 0.0), _row("g", 0, 1.0, num_tokens=5), _row("g", 2, 0.0), _row("g", 0, 1.0)
        )
    )
    a, b, c = _advantages(single)
    assert _advantages(several) == [a, b, a, c, a]


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_none(reward: float) -> None:
    transform = MCAdvantage(normalization="mean")
    batch = transform(_batch(_row("g", 0, reward), _row("g", 1, 1.0), _row("g", 2, 0.0), _row("g", 0, reward)))
    assert _advantages(batch) == [0.5, -0.5] and transform.num_unscored_rollouts == 1


def test_a_component_that_is_not_finite_is_named() -> None:
    rows = [
        _row("g", index, 1.0).update({"reward_breakdown": {"a": torch.tensor([value])}})
        for index, value in enumerate((1.0, float("nan")))
    ]
    with pytest.raises(ValueError, match=r"'g/1' has nan under .*'a'"):
        MCAdvantage(component_weights={"a": 1.0})(_batch(*rows))


def test_unscored_rollouts_leave_the_baseline_and_the_batch() -> None:
    with_failure = MCAdvantage(normalization="mean")
    batch = with_failure(_batch(_row("g", 0, 1.0), _row("g", 1, 50.0, is_scored=False), _row("g", 2, 0.0)))
    assert _advantages(batch) == [0.5, -0.5]
    assert with_failure.num_unscored_rollouts == 1


def test_groups_are_told_by_their_id_even_when_their_prompts_are_the_same() -> None:
    batch = MCAdvantage(normalization="mean")(
        _batch(_row("epoch0", 0, 1.0), _row("epoch1", 0, 10.0), _row("epoch0", 1, 0.0), _row("epoch1", 1, 0.0))
    )
    assert _advantages(batch) == [0.5, 5.0, -0.5, -5.0]


def test_groups_without_signal_are_left_out_unless_asked_for() -> None:
    rows = [_row("a", 0, 1.0), _row("a", 1, 1.0), _row("b", 0, 0.0), _row("b", 1, 1.0), _row("alone", 0, 3.0)]
    dropping, keeping = MCAdvantage(), MCAdvantage(drop_constant_groups=False)
    assert [row["rollout", "group_id"] for row in dropping(_batch(*(r.clone() for r in rows))).unbind(0)] == ["b", "b"]
    assert dropping.num_constant_groups == 2
    assert _advantages(keeping(_batch(*rows)))[:2] == [0.0, 0.0]
    assert dropping(_batch(_row("a", 0, 1.0), _row("a", 1, 1.0))).batch_size == (0,)


def test_rows_that_disagree_on_their_rollouts_reward_are_refused() -> None:
    with pytest.raises(ValueError, match="different values"):
        MCAdvantage()(_batch(_row("g", 0, 1.0), _row("g", 0, 0.5)))


def test_a_replay_buffer_receives_complete_groups_and_keeps_their_advantages() -> None:
    transform = MCAdvantage(grpo_size=2, normalization="mean")
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4)
    buffer.append_transform(transform)
    buffer.extend(_batch(_row("a", 0, 0.0), _row("b", 0, 4.0, num_tokens=7)))
    assert len(buffer) == 0
    buffer.extend(_batch(_row("b", 1, 0.0)))
    assert len(buffer) == 2
    assert {abs(value) for value in _advantages(buffer.sample())} == {2.0}
    buffer.extend(_batch(_row("a", 1, 1.0)))
    assert len(buffer) == 4


def test_a_failed_rollout_completes_its_group() -> None:
    transform = MCAdvantage(grpo_size=3, normalization="mean")
    assert transform.inv(_batch(_row("a", 0, 0.0), _row("a", 1, 1.0))) is None
    complete = transform.inv(_batch(_row("a", 2, 0.0, is_scored=False)))
    assert _advantages(complete) == [-0.5, 0.5]


def test_a_replay_buffer_receives_nothing_of_a_group_without_signal() -> None:
    transform = MCAdvantage(grpo_size=2)
    assert transform.inv(_batch(_row("a", 0, 1.0), _row("a", 1, 1.0))) is None
    # Nothing of it is kept: two more rows are a group.
    assert transform.inv(_batch(_row("a", 2, 0.0))) is None
    assert len(_advantages(transform.inv(_batch(_row("a", 3, 1.0))))) == 2


def test_incomplete_groups_are_not_kept_for_ever() -> None:
    transform = MCAdvantage(grpo_size=2, max_num_waiting_groups=2)
    transform.inv(_batch(_row("a", 0, 0.0), _row("b", 0, 0.0)))
    with pytest.warns(UserWarning, match="Group 'a'"):
        transform.inv(_batch(_row("c", 0, 0.0)))
    assert transform.queue.num_abandoned == 1
    complete = transform.inv(_batch(_row("a", 1, 1.0), _row("b", 1, 1.0), _row("c", 1, 1.0)))
    assert len(_advantages(complete)) == 4


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="normalization"):
        MCAdvantage(normalization="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grpo_size"):
        MCAdvantage(0)
