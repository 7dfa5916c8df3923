"""Advantages: by group id, once per rollout, without what was not scored."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.data import Rollout
from llmrl.data.ragged import value_column
from llmrl.objectives import MCAdvantage, MCAdvantageSelector, group_advantages
from llmrl.objectives.advantages.candidates import CandidateChoice
from llmrl.objectives.advantages.group_queue import GroupQueue
from llmrl.objectives.advantages.grouping import GroupKeys
from llmrl.objectives.advantages.normalization import Baseline


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


def test_a_batch_without_rows_has_no_advantages_and_stays_as_it_is() -> None:
    batch = TensorDict(batch_size=[0])
    assert MCAdvantage(grpo_size=2)(batch) is batch


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
    assert _advantages(batch) == [0.5, -0.5] and transform.unscored_trajectories == 1


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
    assert with_failure.unscored_trajectories == 1


def test_groups_are_distinguished_by_their_id_even_when_their_prompts_are_the_same() -> None:
    batch = MCAdvantage(normalization="mean")(
        _batch(_row("epoch0", 0, 1.0), _row("epoch1", 0, 10.0), _row("epoch0", 1, 0.0), _row("epoch1", 1, 0.0))
    )
    assert _advantages(batch) == [0.5, 5.0, -0.5, -5.0]


def test_groups_without_signal_are_left_out_unless_asked_for() -> None:
    rows = [_row("a", 0, 1.0), _row("a", 1, 1.0), _row("b", 0, 0.0), _row("b", 1, 1.0), _row("alone", 0, 3.0)]
    dropping, keeping = MCAdvantage(), MCAdvantage(drop_constant_groups=False)
    assert [row["rollout", "group_id"] for row in dropping(_batch(*(r.clone() for r in rows))).unbind(0)] == ["b", "b"]
    assert dropping.constant_groups == 2
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


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_buffers_state_has_the_rows_of_incomplete_groups(is_shared: bool) -> None:
    def new_buffer() -> ReplayBuffer:
        transform = MCAdvantage(grpo_size=2, normalization="mean")
        if is_shared:
            transform.share_memory_()
        buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=2)
        buffer.append_transform(transform)
        return buffer

    before, after = new_buffer(), new_buffer()
    before.extend(_batch(_row("a", 0, 0.0), _row("b", 0, 4.0), _row("b", 1, 0.0)))
    state = before.state_dict()
    after.extend(_batch(_row("other", 0, 1.0)))
    after.load_state_dict(pickle.loads(pickle.dumps(state)))
    [transform] = after.transform
    assert list(transform.queues) == ["a"]
    assert (transform.completed_trajectories, transform.written_groups) == (3, 1)
    after.extend(_batch(_row("a", 1, 1.0)))
    assert len(after) == 4 and _advantages(after[2:4]) == [-0.5, 0.5]
    state["_transforms"].clear()  # as older versions saved it
    after.load_state_dict(state)
    assert list(transform.queues) == [] and transform.written_groups == 2


def test_rows_of_a_buffer_state_that_has_lost_their_texts_are_refused() -> None:
    before, after = (ReplayBuffer(storage=LazyStackStorage(16), batch_size=2) for _ in range(2))
    before.extend(_batch(_row("a", 0, 0.0), _row("a", 1, 1.0)))
    after.load_state_dict(before.state_dict())
    with pytest.raises(ValueError, match=r"should be a text and is a TensorDict.* to save rows, pickle the buffer"):
        MCAdvantage()(after[:])
    with pytest.raises(ValueError, match=r"\('rollout', 'rollout_id'\) should be a text and is a TensorDict"):
        value_column(after[:], ("rollout", "rollout_id"))
    assert len(_advantages(MCAdvantage()(pickle.loads(pickle.dumps(before))[:]))) == 2


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
    transform = MCAdvantage(grpo_size=2)
    transform.queue.max_num_waiting = 2
    transform.inv(_batch(_row("a", 0, 0.0), _row("b", 0, 0.0)))
    with pytest.warns(UserWarning, match="Group 'a'"):
        transform.inv(_batch(_row("c", 0, 0.0)))
    assert transform.queue.num_abandoned == 1
    complete = transform.inv(_batch(_row("a", 1, 1.0), _row("b", 1, 1.0), _row("c", 1, 1.0)))
    assert len(_advantages(complete)) == 4


def trajectory(rewards: list[float], group: int | str = 7, num_tokens: int | None = None) -> TensorDictBase:
    """Turns as TorchRL's collectors write them: no ids, each with its own reward, dense where tokens are given."""
    shape = (1,) if num_tokens is None else (num_tokens, 1)
    turns = [
        TensorDict({"query": group, "next": {"reward": torch.full(shape, reward), "done": torch.zeros(1).bool()}})
        for reward in rewards
    ]
    turns[-1]["next", "done"] = torch.ones(1).bool()
    return lazy_stack(turns)


@pytest.mark.usefixtures("takes_long")
@pytest.mark.parametrize("trajectory_return", [None, "sum", "max", "mean"])
def test_turns_have_torchrls_advantages(trajectory_return: Any) -> None:
    from torchrl.objectives.llm import MCAdvantage as Theirs

    rewards = [[0.0, 1.0, 0.5], [0.25], [2.0, -1.0]]
    for num_tokens in (None, 2):
        written = []
        for one in (MCAdvantage, Theirs):
            transform = one(grpo_size=3, trajectory_return=trajectory_return)
            out = [transform.inv(trajectory(turns, group, num_tokens)) for turns in rewards for group in ("a", "b")]
            assert out[:4] == [None] * 4
            written.append([[row["advantage"] for row in group.unbind(0)] for group in out[4:]])
        for ours, theirs in zip(*written, strict=True):
            torch.testing.assert_close(ours, [value.reshape(ours[0].shape) for value in theirs])


@pytest.mark.parametrize(
    "options",
    [
        {"keep_return_bounds": (0.1, 0.9)},
        {"candidate_group_size": 4},
        {"normalize_batch": True},
        {"component_weights": {"exact": 1.0}},
    ],
)
def test_what_compares_rollouts_is_refused_for_single_turns(options: dict[str, Any]) -> None:
    turns = lazy_stack([*trajectory([0.0, 1.0]).unbind(0), *trajectory([1.0, 0.0]).unbind(0)])
    with pytest.raises(ValueError, match=f"{next(iter(options))} compare returns of rollouts"):
        MCAdvantage(grpo_size=2, **options)(turns)


def test_the_group_of_turns_is_that_of_their_first() -> None:
    transform = MCAdvantage(2)
    for question in ("a", "b"):
        turns = trajectory([0.0, 1.0])
        for turn, query in zip(turns.unbind(0), ("start", question), strict=True):
            turn["query"] = query
        out = transform.inv(turns)
    assert out.batch_size == (4,) and set(transform.queues) == set()


def test_several_trajectories_of_turns_may_come_at_once() -> None:
    whole = lazy_stack([*trajectory([0.0, 0.0]).unbind(0), *trajectory([0.0, 1.0]).unbind(0)])
    transform = MCAdvantage(grpo_size=2, trajectory_return="sum")
    expected = torch.tensor([-0.7071, -0.7071, 0.7071, 0.7071])
    torch.testing.assert_close(transform.inv(whole)["advantage"].flatten(), expected, atol=1e-4, rtol=0)
    with pytest.raises(RuntimeError, match="not done"):
        transform.inv(trajectory([0.0, 0.0])[:1])


def test_turns_of_different_environments_are_no_trajectory() -> None:
    def turn(query: str, reward: float, is_done: bool) -> TensorDict:
        return TensorDict({"query": query, "next": {"reward": torch.tensor([reward]), "done": torch.tensor([is_done])}})

    ended = [[turn("a", 0.0, False), turn("a", 1.0, True)], [turn("a", 0.0, True), turn("a", 2.0, True)]]
    batch = MCAdvantage(trajectory_return="sum", normalization="mean")(lazy_stack([lazy_stack(env) for env in ended]))
    assert batch["advantage"].flatten().tolist() == [0.0, 0.0, -1.0, 1.0]  # the trajectories return 1, 0 and 2
    cut = [[turn("a", 0.0, False), turn("a", 1.0, False)], [turn("b", 0.0, False), turn("b", 2.0, True)]]
    for rows in (cut, cut):  # a second time, too
        with pytest.raises(RuntimeError, match="not done"):
            MCAdvantage(trajectory_return="sum")(lazy_stack([lazy_stack(env) for env in rows]))


def test_a_turn_without_a_score_leaves_the_others_of_its_group() -> None:
    turns = [turn for reward in (1.0, float("nan"), 0.0) for turn in trajectory([reward]).unbind(0)]
    transform = MCAdvantage(normalization="mean")
    assert transform(lazy_stack(turns))["advantage"].flatten().tolist() == [0.5, -0.5]
    assert transform.unscored_trajectories == 1


def test_rewards_that_are_equal_in_a_row_are_no_signal() -> None:
    rewards = (0.3, 0.1 + 0.2)
    assert rewards[0] != rewards[1]  # and equal in float32
    rollouts = [
        Rollout(rollout_id=f"g/{i}", group_id="g", sample_index=i, group_size=2, is_scored=True) for i in range(2)
    ]
    for rollout, reward in zip(rollouts, rewards, strict=True):
        rollout.num_turns = 1
        rollout.add_reward(reward)
    for options in ({}, {"gamma": 0.9}):
        assert not MCAdvantage(**options).has_signal(rollouts)
    assert MCAdvantage()(_batch(_row("g", 0, rewards[0]), _row("g", 1, rewards[1]))).batch_size == (0,)


@pytest.mark.usefixtures("takes_long")
@pytest.mark.parametrize("min_size", [None, 3, 4])
def test_candidates_come_until_a_choice_is_within_bounds_as_in_torchrl(min_size: int | None) -> None:
    from torchrl.objectives.llm import MCAdvantage as Theirs

    returns = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    histories = []
    for one in (MCAdvantage, Theirs):
        transform = one(
            2,
            trajectory_return="sum",
            candidate_group_size=4,
            candidate_selection_min_size=min_size,
            keep_return_bounds=(0.1, 0.9),
        )
        out = [transform.inv(trajectory([value])) for value in returns]
        stats = transform.get_stats()
        histories.append(([None if one is None else one["advantage"].flatten().tolist() for one in out], stats))
    (ours, counted), (theirs, expected) = histories
    assert [one if one is None else pytest.approx(one) for one in theirs] == ours
    assert {name: counted[name] for name in expected} == expected
    assert counted["written_groups"] > 0 and counted["queued_trajectories"] == expected["queued_trajectories"]
    transform = MCAdvantage(2)
    transform.inv(trajectory([0.0]))
    assert [len(queue) for queue in transform.queues.values()] == [1]
    assert (transform.queued_groups, transform.max_queued_trajectories_per_group) == (1, 1)
    transform.clear_queues()
    transform.reset_stats()
    assert transform.queued_trajectories == 0 and transform.completed_trajectories == 0


def test_a_part_of_a_group_that_is_out_of_bounds_is_dropped_when_the_group_is_complete() -> None:
    rows = [_row("g", index, reward) for index, reward in enumerate((1.0, 1.0, 0.0, 1.0))]
    for row, role in zip(rows, "aabb", strict=True):
        row["rollout", "role"] = NonTensorData(role)
    transform = MCAdvantage(4, by="role", keep_return_bounds=(0.1, 0.9), normalization="mean")
    assert transform.inv(_batch(*rows[:3])) is None and transform.queued_groups == 1
    assert _advantages(transform.inv(_batch(rows[3]))) == [-0.5, 0.5]
    assert (transform.queued_groups, transform.dropped_groups, transform.written_groups) == (0, 1, 1)


@pytest.mark.parametrize("options", [{}, {"candidate_group_size": 8}])
def test_a_group_that_is_complete_by_its_rows_waits_for_no_more(options: dict[str, Any]) -> None:
    rows = [_row("g", index, 1.0) for index in range(2)]
    for row in rows:
        row["rollout", "num_in_group"] = torch.tensor(2)
    transform = MCAdvantage(4, keep_return_bounds=(0.1, 0.9), **options)
    assert transform.inv(_batch(*rows)) is None
    assert (transform.queued_groups, transform.dropped_groups) == (0, 1)


def test_a_selector_of_ones_own_reads_the_candidates_rows() -> None:
    class Shortest(MCAdvantageSelector):
        def select(self, candidates: Any, *, group_size: int, keep_return_bounds: Any = None) -> list[int]:
            lengths = [len(rollout["tokens", "full"][0]) for rollout in candidates["trajectories"].unbind(0)]
            return sorted(range(len(lengths)), key=lengths.__getitem__)[:group_size]

    transform = MCAdvantage(
        2, candidate_group_size=3, candidate_selector=Shortest(in_keys=["return", "trajectories"]), normalization="mean"
    )
    rows = [_row("g", 0, 1.0, num_tokens=9), _row("g", 1, 0.0, num_tokens=2), _row("g", 2, 1.0)]
    assert _advantages(transform(_batch(*rows))) == [-0.5, 0.5]
    rollout = Rollout(rollout_id="g/0", group_id="g", sample_index=0, group_size=1, is_scored=True)
    with pytest.raises(ValueError, match=r"candidate_selector reads .* has_signal has the returns only"):
        transform.has_signal([rollout])


def _extend(transform: MCAdvantage, reward: float) -> None:
    transform.inv(trajectory([reward]))


@pytest.mark.slow
def test_counters_without_a_group_size_are_shared_once() -> None:
    transform = MCAdvantage().share_memory_()
    other = pickle.loads(pickle.dumps(transform))
    assert transform.is_shared and other.is_shared
    transform.share_memory_()(_batch(_row("g", 0, 1.0), _row("g", 1, 0.0)))
    assert other.completed_trajectories == 2


@pytest.mark.slow
def test_groups_are_shared_by_the_processes_that_write() -> None:
    transform = MCAdvantage(grpo_size=3, trajectory_return="sum")
    transform.inv(trajectory([0.0]))
    assert not transform.is_shared and transform.share_memory_().share_memory_().is_shared
    child = multiprocessing.get_context("fork").Process(target=_extend, args=(transform, 2.0))
    child.start()
    child.join(60)
    assert (transform.completed_trajectories, transform.queued_trajectories) == (2, 2)
    assert transform.inv(trajectory([1.0]))["advantage"].flatten().tolist() == [-1.0, 1.0, 0.0]
    assert (transform.written_groups, transform.queued_groups) == (1, 0)
    assert pickle.loads(pickle.dumps(transform)).completed_trajectories == 3


def test_a_baseline_normalizes_each_column_and_adds_what_is_weighted() -> None:
    baseline = Baseline("std", weights=(1.0, 3.0))
    columns = [[0.0, 2.0], [70.0, 10.0]]
    root = 0.5**0.5
    assert baseline.advantages(columns) == pytest.approx([-root + 3 * root, root - 3 * root])
    assert not baseline.is_constant(columns) and not baseline.is_constant([[1.0, 1.0], [0.0, 1.0]])
    assert baseline.is_constant([[1.0, 1.0], [0.0, 0.0]])
    assert not Baseline("none").is_constant([[1.0, 1.0]])


def test_a_choice_of_candidates_says_what_is_sampled_and_waited_for() -> None:
    sizes = [CandidateChoice(), CandidateChoice(2), CandidateChoice(2, 8), CandidateChoice(2, 8, 4)]
    assert [one.sampled_size for one in sizes] == [None, 2, 8, 8]
    assert [one.waited_size for one in sizes] == [None, 2, 2, 4]
    assert list(CandidateChoice(2).choose([1.0, 2.0, 3.0]) or ()) == [0, 1, 2]
    assert CandidateChoice(bounds=(0.1, 0.9)).choose([0.0, 0.0]) is None
    assert CandidateChoice(2, 4, bounds=(0.1, 0.9)).choose([0.0, 0.0, 1.0, 0.0]) is not None


def test_a_queue_hands_out_a_group_when_as_many_rollouts_came_as_its_rows_say() -> None:
    queue = GroupQueue(GroupKeys(), 4)
    rows = [_row("g", index, 0.0) for index in (0, 0, 1)]
    for row in rows:
        row["rollout", "num_in_group"] = torch.tensor(2)
    assert queue.push(rows[:2]) == [] and len(queue.rollouts()["g"]) == 1
    assert len(queue.push(rows[2:])) == 3 and not queue.waiting
    assert queue.push([_row("h", index, 0.0) for index in range(3)]) == []  # of these, four are waited for


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="normalization"):
        MCAdvantage(normalization="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="grpo_size"):
        MCAdvantage(0)
