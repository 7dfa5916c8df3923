"""The collector's pure cores: groups by counting, admission on demand, bounded staleness."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrl.collectors.gates import DemandGate, StalenessGate
from llmrl.collectors.groups import CollectionStalled, DropReason, GroupCounter, GroupRules, StallDetector
from llmrl.data import Rollout, RolloutStatus
from llmrl.objectives import MCAdvantage


def rollout(index=0, reward=0.0, status=RolloutStatus.COMPLETED, is_scored=True, num_tokens=3, **kwargs):
    return Rollout(
        rollout_id=f"g/{index}", group_id="g", sample_index=index, group_size=8, reward=reward, status=status,
        is_scored=is_scored, num_completion_tokens=num_tokens, **kwargs,
    )  # fmt: skip


def reasons(dropped):
    return [reason for _, reason in dropped]


rollouts = st.builds(
    rollout,
    index=st.integers(0, 7),
    reward=st.sampled_from([0.0, 1.0]),
    status=st.sampled_from([RolloutStatus.COMPLETED, RolloutStatus.TRUNCATED, RolloutStatus.ERROR]),
    is_scored=st.booleans(),
    num_tokens=st.integers(0, 2),
)
rules = st.builds(
    GroupRules,
    min_survivors=st.integers(1, 4),
    drop_failed_groups=st.booleans(),
    group_filter=st.sampled_from([None, MCAdvantage().has_signal]),
    drop_truncated=st.booleans(),
    rollout_filter=st.sampled_from([None, lambda rollout: rollout.sample_index % 2 == 0]),
)


@given(rules, st.lists(rollouts, min_size=1, max_size=8))
def test_every_rollout_is_delivered_or_dropped_with_a_reason(rules, rollouts):
    kept, dropped = rules.judge(rollouts)
    assert Counter(map(id, kept)) + Counter(id(r) for r, _ in dropped) == Counter(map(id, rollouts))
    assert all(reason for _, reason in dropped)
    assert all(r.is_scored and r.num_completion_tokens for r in kept)
    assert not kept or len(kept) >= rules.min_survivors


def test_survivors_are_kept_unless_the_group_was_scored_together():
    group = [rollout(0), rollout(1, status=RolloutStatus.ERROR, is_scored=False, reason="engine_error"), rollout(2)]
    kept, dropped = GroupRules().judge(group)
    assert [r.sample_index for r in kept] == [0, 2] and reasons(dropped) == ["engine_error"]
    kept, dropped = GroupRules(drop_failed_groups=True).judge(group)
    assert not kept
    assert reasons(dropped) == [DropReason.FAILED_GROUP, "engine_error", DropReason.FAILED_GROUP]
    kept, dropped = GroupRules(min_survivors=3).judge(group)
    assert reasons(dropped) == [DropReason.TOO_FEW_SURVIVORS, "engine_error", DropReason.TOO_FEW_SURVIVORS]


def test_groups_without_signal_and_overlong_rollouts_are_dropped_when_asked():
    constant = [rollout(0, reward=1.0), rollout(1, reward=1.0)]
    assert len(GroupRules().judge(constant)[0]) == 2
    assert (
        reasons(GroupRules(group_filter=MCAdvantage().has_signal).judge(constant)[1])
        == [DropReason.CONSTANT_REWARDS] * 2
    )
    mixed = [rollout(0), rollout(1, status=RolloutStatus.TRUNCATED, reason="length")]
    assert reasons(GroupRules(drop_truncated=True).judge(mixed)[1]) == [DropReason.TRUNCATED]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.randoms())
def test_a_group_is_ready_exactly_when_its_last_rollout_settled(sizes, random):
    counter, ready = GroupCounter(), []
    for group, size in enumerate(sizes):
        counter.open(str(group), size)
    order = [(group, index) for group, size in enumerate(sizes) for index in range(size)]
    random.shuffle(order)
    num_left = dict(enumerate(sizes))
    for group, index in order:
        settled = counter.settle(str(group), rollout(index))
        num_left[group] -= 1
        assert (settled is not None) == (num_left[group] == 0)
        if settled is not None:
            ready.append(group)
            assert [r.sample_index for r in settled] == list(range(sizes[group]))
    assert sorted(ready) == list(range(len(sizes))) and len(counter) == 0


def test_ids_may_not_be_open_twice_and_abandoned_groups_give_back_what_settled():
    counter = GroupCounter()
    counter.open("g", 2)
    with pytest.raises(ValueError, match="open already"):
        counter.open("g", 2)
    counter.settle("g", rollout(1))
    assert [r.sample_index for r in counter.abandon("g")] == [1] and counter.abandon("g") == []


def test_a_stream_of_dropped_groups_warns_then_raises(caplog):
    watch = StallDetector(2)
    watch.delivered()
    bad = [(rollout(error="broken tool"), "environment_error")]
    for _ in range(15):
        watch.dropped(bad)
    assert caplog.text.count("nothing to train on") == 7
    with pytest.raises(CollectionStalled, match=r"16 groups.*environment_error.*broken tool"):
        watch.dropped(bad)
    watch.delivered()
    watch.dropped(bad)


def test_a_limit_that_agents_met_is_named():
    watch = StallDetector(1)
    watch.delivered()
    with pytest.raises(CollectionStalled, match=r"'unscored \(max_turns\)': 8"):
        for _ in range(8):
            watch.dropped([(rollout(reason="max_turns"), DropReason.UNSCORED)])


@given(st.integers(1, 5), st.integers(0, 3), st.lists(st.booleans(), max_size=60))
def test_demand_is_refilled_exactly(groups_per_batch, num_extra, fates):
    gate, next_id, num_delivered = DemandGate(groups_per_batch, num_extra=num_extra), 0, 0
    fates = iter(fates)
    for _ in range(4):
        assert num_extra or gate.num_admissible(0) == 0
        gate.request_batch()
        while (selected := gate.select(0)) is None:
            while gate.num_admissible(0):
                gate.admit(str(next_id), 0)
                next_id += 1
            num_open = len(gate.live_ids) - len(gate.ready)
            assert len(gate.ready) + num_open == groups_per_batch + num_extra
            oldest = next(group_id for group_id in gate.live_ids if group_id not in gate.ready)
            if next(fates, True):
                gate.mark_ready(oldest)
            else:
                gate.discard(oldest)
        assert len(selected.group_ids) == groups_per_batch
        num_delivered += groups_per_batch
        for left in gate.live_ids:
            gate.discard(left)


@given(st.integers(1, 20), st.lists(st.integers(1, 7), min_size=1, max_size=40))
def test_turns_beyond_a_batch_are_credited_to_the_next(turns_per_batch, sizes):
    gate, delivered, played = DemandGate(turns_per_batch, surplus="carry"), 0, 0
    for index, size in enumerate(sizes):
        gate.admit(str(index), 0)
        gate.mark_ready(str(index), size)
        played += size
        while (selected := gate.select(0)) is not None:
            delivered += turns_per_batch
            assert selected.group_ids or gate.credit >= 0
    assert 0 <= played - delivered < turns_per_batch
    assert gate.credit + gate.ready_units == played - delivered


@given(st.integers(5, 50), st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_token_budget_is_exceeded_by_nothing_but_a_single_group(budget, sizes):
    gate, seen = DemandGate(budget, estimate_units=True), []
    for index, size in enumerate(sizes):
        gate.admit(str(index), 0)
        gate.mark_ready(str(index), size)
        while (selected := gate.select(0)) is not None:
            units = [sizes[int(group_id)] for group_id in selected.group_ids]
            assert sum(units) <= budget or len(units) == 1
            seen += selected.group_ids
    while (selected := gate.select(0, is_last=True)) is not None:
        seen += selected.group_ids
    assert seen == [str(index) for index in range(len(sizes))]


def play(gate, *, num_batches, seed, updates, drop_rate=0.2, is_unasked=False, stale=None):
    """A trainer and a collector with random speeds; yields what was selected and at which version."""
    rng, version, next_id, open_ids, stale = random.Random(seed), 0, 0, [], [] if stale is None else stale
    for _ in range(num_batches):
        if not is_unasked:
            gate.request_batch()
        for _ in range(10_000):
            while gate.num_admissible(version):
                gate.admit(str(next_id), version)
                open_ids.append(str(next_id))
                next_id += 1
            for overdue in gate.overdue_ids(version):
                gate.discard(overdue)
                stale.append(overdue)
                open_ids = [group_id for group_id in open_ids if group_id != overdue]
            if open_ids and rng.random() < 0.9:
                # Skewed to the newest: the oldest are the stragglers.
                settled = open_ids.pop(max(rng.randrange(len(open_ids)) for _ in range(3)))
                (gate.discard if rng.random() < drop_rate else gate.mark_ready)(settled)
            selected = gate.select(version)
            if selected is not None:
                break
        else:
            raise AssertionError("no batch came: admission and delivery wait for each other")
        yield selected, version
        version += updates


@settings(max_examples=60)
@given(st.integers(1, 6), st.integers(0, 4), st.sampled_from(["wait", "drop"]), st.integers(0, 10_000))
def test_no_group_is_ever_staler_than_the_bound(groups_per_batch, max_staleness, late, seed):
    gate, stale = StalenessGate(groups_per_batch, max_staleness=max_staleness, late=late), []
    for selected, _ in play(gate, num_batches=20, seed=seed, updates=1, stale=stale):
        assert len(selected.group_ids) == groups_per_batch
        assert max(selected.staleness.values()) <= max_staleness
    # With one update per batch, waiting alone keeps the bound: nothing is thrown away.
    assert late == "drop" or not stale


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 10_000))
def test_the_bound_holds_for_a_buffer_that_never_asks(groups_per_batch, max_staleness, seed):
    gate = StalenessGate(groups_per_batch, max_staleness=max_staleness)
    gate.run_unasked()
    for batch, (selected, version) in enumerate(play(gate, num_batches=20, seed=seed, updates=1, is_unasked=True)):
        assert batch <= version + max_staleness and max(selected.staleness.values()) <= max_staleness


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 10_000))
def test_a_trainer_that_never_updates_is_never_kept_waiting(groups_per_batch, max_staleness, seed):
    gate = StalenessGate(groups_per_batch, max_staleness=max_staleness)
    for selected, _ in play(gate, num_batches=20, seed=seed, updates=0):
        assert set(selected.staleness.values()) == {0}


@settings(max_examples=30)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 10_000))
def test_several_updates_a_batch_never_break_the_bound(groups_per_batch, max_staleness, seed):
    gate = StalenessGate(groups_per_batch, max_staleness=max_staleness)
    for selected, _ in play(gate, num_batches=15, seed=seed, updates=2):
        assert max(selected.staleness.values()) <= max_staleness


@settings(max_examples=60)
@given(st.integers(1, 4), st.integers(0, 3), st.booleans(), st.integers(0, 10_000))
def test_batches_that_bring_nothing_are_replaced_within_the_bound(groups_per_batch, max_staleness, is_unasked, seed):
    gate, rng, version = StalenessGate(groups_per_batch, max_staleness=max_staleness), random.Random(seed), 0
    if is_unasked:
        gate.run_unasked()
    next_id, open_ids, num_trained = itertools.count(), [], 0
    for _ in range(4000):
        if not is_unasked:
            gate.request_batch()
        for _ in range(gate.num_admissible(version)):
            open_ids.append(str(next(next_id)))
            gate.admit(open_ids[-1], version)
        assert len(gate.live_ids) <= groups_per_batch * (max_staleness + 1)
        overdue = gate.overdue_ids(version)
        for group_id in overdue:
            gate.discard(group_id)
        open_ids = [group_id for group_id in open_ids if group_id not in overdue]
        if open_ids:
            gate.mark_ready(open_ids.pop(rng.randrange(len(open_ids))))
        if (selected := gate.select(version)) is not None:
            assert max(selected.staleness.values()) <= max_staleness
            if rng.random() < 0.5:  # nothing in it had signal: no update comes of it
                gate.rollback()
            else:
                num_trained += 1
                version += 1
        if num_trained == 10:
            return
    raise AssertionError("no batch came: what brought nothing took the places of others")


def test_collection_runs_ahead_by_max_staleness_batches_and_no_further():
    gate = StalenessGate(3, max_staleness=2)
    assert gate.num_admissible(0) == 9
    for index in range(9):
        gate.admit(str(index), 0)
        gate.mark_ready(str(index))
    assert gate.num_admissible(0) == 0
    assert gate.select(0).group_ids == ["0", "1", "2"]
    # The trainer still works on that batch.
    assert gate.num_admissible(0) == 0
    assert gate.num_admissible(1) == 3


def test_a_batch_waits_for_the_straggler_that_would_be_too_old_in_the_next():
    gate = StalenessGate(1, max_staleness=1)
    gate.admit("slow", 0)
    gate.admit("fast", 0)
    gate.mark_ready("fast")
    assert gate.select(0).group_ids == ["fast"]
    gate.admit("next", 1)
    gate.mark_ready("next")
    assert gate.select(1) is None  # `slow` has its deadline at batch 1
    gate.mark_ready("slow")
    assert gate.select(1).group_ids == ["slow"]
