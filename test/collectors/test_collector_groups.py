"""Groups stay whole, demand stays bounded, and no batch is empty: whatever was drawn, failed or taught nothing."""

from __future__ import annotations

import itertools
import queue
import re
import time
from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import check_env_specs
from waiting import wait_until

from llmrl.collectors import CollectionStalled, DropReason, GroupRules, LLMCollector
from llmrl.envs import DataLoadingPrimer, DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep, PromptSampler
from llmrl.envs.chat import ChatEnv
from llmrl.objectives import MCAdvantage, TopKRewardSelector
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import Rubric, Score
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

DATASET = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(50)]


@pytest.fixture
def make_policy(renderer):
    def make(script=("1<|im_end|>", "2<|im_end|>"), **engine_kwargs):
        engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode, **engine_kwargs)
        return LLMWrapperBase(engine, renderer=renderer)

    return make


def exact(completion, answer):
    return float(completion == answer)


def addition(repeats=4, reward=exact, *, size=50, **kwargs):
    return DatasetChatEnv(DATASET[:size], repeats=repeats, **kwargs).append_transform(RubricReward(reward))


def group_sizes(batch):
    return list(Counter(batch["rollout", "group_id"]).values())


# Groups begin where groups begin


def primed(repeats):
    return ChatEnv().append_transform(DataLoadingPrimer(DATASET, repeats=repeats)).append_transform(RubricReward(exact))


@pytest.mark.parametrize(
    ("make_env", "draw"),
    [
        (addition, lambda env, collector: env.reset()),
        (addition, lambda env, collector: env.reset(TensorDict(batch_size=[6]))),
        (addition, lambda env, collector: check_env_specs(env)),
        (addition, lambda env, collector: collector.play(1)),
        (addition, lambda env, collector: collector.play(7)),
        (primed, lambda env, collector: env.reset()),
    ],
    ids=["reset", "batched reset", "check_env_specs", "play", "play of more than a group", "reset of a primer"],
)
def test_a_stray_draw_misaligns_no_group(make_policy, make_env, draw):
    env = make_env(repeats=4)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2) as collector:
        draw(env, collector)
        sizes = [group_sizes(batch) for batch in itertools.islice(collector, 1)]
        draw(env, collector)
        sizes += [group_sizes(batch) for batch in itertools.islice(collector, 2)]
    assert sizes == [[4, 4]] * 3


def test_a_stray_draw_misaligns_no_group_of_a_resumed_run(make_policy):
    with LLMCollector(addition(), policy=make_policy(), groups_per_batch=2, max_staleness=1) as collector:
        delivered = Counter(collector.next()["rollout", "rollout_id"])
        state = collector.state_dict()
    num_again = len(state["env"]["prompts"]["again"])
    env = addition()
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2) as resumed:
        resumed.load_state_dict(state)
        env.reset()  # draws one of those that are to be played again
        batches = [resumed.next() for _ in range(4)]
    assert num_again % 4 == 0 and [group_sizes(batch) for batch in batches] == [[4, 4]] * 4
    for batch in batches:
        delivered.update(batch["rollout", "rollout_id"])
    assert set(delivered.values()) == {1}  # an id is never given twice


def test_rollouts_that_are_scored_together_are_of_one_prompt_in_play_too(make_policy):
    class SizeOfGroup(Rubric):
        is_group_scored = True

        async def score_group(self, rollouts):
            return [Score(float(len(rollouts)), {})] * len(rollouts)

    env = DatasetChatEnv(DATASET, repeats=4).append_transform(RubricReward(SizeOfGroup(exact)))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        env.reset()
        assert [rollout.reward for rollout in collector.play(8)] == [4.0] * 8


def test_draws_of_other_code_within_a_group_are_an_error(make_policy, monkeypatch):
    env = addition()
    draw_many = env.base_env.prompts.draw_many
    monkeypatch.setattr(
        env.base_env.prompts, "draw_many", lambda count: draw_many(1) and draw_many(count)
    )  # as another thread's reset would, between the look at the position and the draw
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        with pytest.raises(RuntimeError, match="another reader drew"):
            collector.next()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"repeats": 2}, "num_samples=4 there, 2 here"),
        ({"seed": 1}, "seed=0 there, 1 here"),
        ({"shuffle": True}, "shuffle=False there, True here"),
        ({"name": "other"}, "name='train' there, 'other' here"),
    ],
)
def test_a_state_is_refused_where_its_positions_would_be_other_draws(make_policy, changed, named):
    with LLMCollector(addition(), policy=make_policy(), groups_per_batch=1) as collector:
        collector.next()
        state = collector.state_dict()
    with LLMCollector(addition(**{"repeats": 4, **changed}), policy=make_policy(), groups_per_batch=1) as other:
        with pytest.raises(ValueError, match=named):
            other.load_state_dict(state)
    longer = PromptSampler([*DATASET, DATASET[0]], num_samples=4)
    with pytest.raises(ValueError, match="num_prompts=50 there, 51 here"):
        longer.load_state_dict(state["env"]["prompts"])


def test_a_state_of_turns_is_refused_by_a_collector_of_groups(make_policy):
    with LLMCollector(addition(1), policy=make_policy(), dialog_turns_per_batch=3) as collector:
        collector.next()
        state = collector.state_dict()
    with LLMCollector(addition(1), policy=make_policy(), groups_per_batch=1) as other:
        with pytest.raises(ValueError, match="saved with batches of turns, and this collector has batches of groups"):
            other.load_state_dict(state)


# Demand: a collector with a buffer that is iterated is asked like one without; in the background it is bounded


def buffer_of(size=1000, transform=None):
    buffer = ReplayBuffer(storage=LazyStackStorage(size), batch_size=4)
    return buffer if transform is None else buffer.append_transform(transform)


@pytest.mark.parametrize("kind", ["buffer", "queue"])
def test_an_iterated_collector_with_a_buffer_collects_what_it_is_asked_for_and_on_policy(make_policy, kind):
    policy, buffer, items = make_policy(), buffer_of(), queue.Queue()
    arguments = {"replay_buffer": buffer} if kind == "buffer" else {"queue": items}
    with LLMCollector(
        addition(), policy=policy, groups_per_batch=2, max_concurrent_rollouts=32, **arguments
    ) as collector:
        versions = []
        for version, _ in enumerate(itertools.islice(collector, 6)):
            time.sleep(0.02)  # training, while nothing may be collected
            assert len(policy.engine.requests) == 8 * (version + 1)
            rows = [items.get() for _ in range(8)] if kind == "queue" else [buffer[i] for i in range(-8, 0)]
            versions += [int(row["policy_versions", "full"].max()) - version for row in rows]
            policy.engine.policy_version = version + 1
    assert versions == [0] * 48


def test_in_the_background_a_full_queue_holds_collection_up(make_policy):
    policy, items = make_policy(), queue.Queue(maxsize=4)
    with LLMCollector(
        addition(), policy=policy, groups_per_batch=2, max_concurrent_rollouts=8, queue=items
    ) as collector:
        collector.start()
        wait_until(items.full)
        wait_until(lambda: len(policy.engine.requests) >= 16 and policy.engine.num_in_flight == 0)
        time.sleep(0.3)
        # A batch that is being written, one that is ready, and what was in flight when that became ready.
        assert len(policy.engine.requests) <= 8 + 8 + 8 and policy.engine.num_in_flight == 0
        taken = [items.get(timeout=240)["rollout", "rollout_id"] for _ in range(40)]
        assert taken == [f"train/0/{group}/{sample}" for group in range(10) for sample in range(4)]


# On a buffer, a group is complete when all of it that was delivered is there


def rows_of(buffer):
    return Counter(buffer[index]["rollout", "group_id"] for index in range(len(buffer)))


@pytest.mark.parametrize("transform", [lambda: MCAdvantage(4), lambda: TopKRewardSelector(4, 2)])
def test_groups_of_which_a_member_failed_or_was_filtered_reach_the_buffer(make_policy, transform):
    def scored_but_for_one(completion, answer):
        if completion == "3":
            raise RuntimeError("a broken judge")
        return float(completion == "1")

    policy = make_policy(["1<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>"])
    buffer = buffer_of(transform=transform())
    rules = GroupRules(rollout_filter=lambda rollout: not rollout.messages[-1]["content"].startswith("4"))
    env = addition(reward=scored_but_for_one)
    with LLMCollector(
        env,
        policy=policy,
        groups_per_batch=2,
        max_concurrent_rollouts=1,
        replay_buffer=buffer,
        group_rules=rules,
    ) as collector:
        for _ in itertools.islice(collector, 3):
            pass
        # Two of the four are left of each group: one that is right, one that is wrong.
        num_rows = 2 if transform().__class__ is MCAdvantage else 1
        assert rows_of(buffer) == {f"train/0/{group}": num_rows for group in range(6)}
        assert sum(collector.report.num_dropped_by_reason.values()) == 4


def test_a_buffer_that_gets_nothing_of_a_batch_is_given_another(make_policy):
    def hard_at_first(completion, answer):
        return float(completion == "1") if int(answer) > 5 else 0.0

    for arguments in (
        {"replay_buffer": buffer_of(transform=MCAdvantage(4))},
        {"replay_buffer": buffer_of(), "postproc": MCAdvantage(4)},
    ):
        env = addition(reward=hard_at_first)
        with LLMCollector(env, policy=make_policy(), groups_per_batch=2, **arguments) as collector:
            next(iter(collector))
            assert rows_of(arguments["replay_buffer"]) == {"train/0/5": 4}
            if "postproc" in arguments:
                assert collector.report.num_dropped_by_reason == {DropReason.CONSTANT_REWARDS: 20}


class FailsOnce(ReplayBuffer):
    has_failed = False

    def extend(self, data):
        if not self.has_failed:
            self.has_failed = True
            raise OSError("the disk is full")
        return super().extend(data)


def losing(where):
    """Arguments of a collector and what is set on it, so that its first batch is lost by an error."""
    errors = iter([OSError("the disk is full")])

    def fail_once(batch):
        for error in errors:
            raise error
        return batch

    if where == "extend":
        return {"replay_buffer": FailsOnce(storage=LazyStackStorage(100))}, lambda collector: None
    if where == "postproc":
        return {"postproc": fail_once}, lambda collector: None
    return {}, lambda collector: collector.set_post_collect_hook(fail_once)


@pytest.mark.parametrize("where", ["postproc", "hook", "extend"])
def test_a_batch_that_an_error_loses_is_counted_and_lost_for_the_state_too(make_policy, where):
    arguments, prepare = losing(where)
    with LLMCollector(addition(2), policy=make_policy(), groups_per_batch=2, **arguments) as collector:
        prepare(collector)
        with pytest.raises(OSError, match="disk is full"):
            next(iter(collector))
        state = collector.state_dict()
        batch = next(iter(collector))
        batch = collector.replay_buffer[:] if batch is None else batch
        report = collector.report
    with LLMCollector(addition(2), policy=make_policy(), groups_per_batch=2) as resumed:
        resumed.load_state_dict(state)
        groups = [set(one["rollout", "group_id"]) for one in (batch, resumed.next())]
    assert groups == [{"train/0/2", "train/0/3"}] * 2
    assert report.num_rollouts == 8 and sum(report.num_dropped_by_reason.values()) == 4


class TwoTurns(MessageEnv):
    def __init__(self, item):
        self.num_turns = 0

    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        self.num_turns += 1
        return MessageStep([{"role": "user", "content": "again"}], reward=1.0, is_done=self.num_turns == 2)


@pytest.mark.parametrize("returned", [None, [], "batch"])
def test_a_postproc_that_returns_no_tensordict_is_an_error_at_the_first_batch(make_policy, returned):
    num_calls = 0

    def postproc(batch):
        nonlocal num_calls
        num_calls += 1
        return returned if num_calls == 1 else batch

    with LLMCollector(addition(2), policy=make_policy(), groups_per_batch=1, postproc=postproc) as collector:
        with pytest.raises(TypeError, match=f"postproc must return .* a TensorDict.*got {re.escape(repr(returned))}"):
            collector.next()
        assert list(collector.next()["rollout", "group_id"]) == ["train/0/1"] * 2
        assert collector.report.num_dropped_by_reason == {DropReason.POSTPROC: 2}


@pytest.mark.parametrize("where", ["postproc", "hook", "extend"])
def test_batches_of_turns_are_full_after_an_error_lost_one(make_policy, where):
    """The lost batch takes three of the four turns of two rollouts, and the next one begins with the fourth."""
    arguments, prepare = losing(where)
    arguments |= {"dialog_turns_per_batch": 3, "max_concurrent_rollouts": 1}
    with LLMCollector(MessageChatEnv(TwoTurns, [{}]), policy=make_policy(), **arguments) as collector:
        prepare(collector)
        with pytest.raises(OSError, match="disk is full"):
            next(iter(collector))
        batch = next(iter(collector))
        batch = collector.replay_buffer[:] if batch is None else batch
        assert batch["next", "done"].flatten().tolist() == [True, False, True]
        assert collector.state_dict()["num_turns"] == 6


def test_a_rollout_that_a_postproc_and_then_a_buffer_leave_out_is_counted_once(make_policy):
    class KeepsNothingOnce(FailsOnce):
        def extend(self, data):
            try:
                return super().extend(data)
            except OSError:
                return torch.empty(0, dtype=torch.long)

    buffer = KeepsNothingOnce(storage=LazyStackStorage(100))
    arguments = {"replay_buffer": buffer, "postproc": lambda batch: batch[:1]}
    with LLMCollector(addition(2), policy=make_policy(), groups_per_batch=1, **arguments) as collector:
        next(iter(collector))
        metrics = collector.report.to_metrics()
    # Of two groups of two, one rollout is in the buffer.
    assert len(buffer) == 1
    assert (metrics["num_rollouts"], metrics["num_dropped"], metrics["trained_share"]) == (4, 3, 0.25)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_buffer_in_the_background_is_not_starved_by_groups_without_signal(make_policy, max_staleness):
    buffer = buffer_of(transform=MCAdvantage(2))

    def late(completion, answer):
        return float(completion == "1" and int(answer) > 20)

    env = addition(2, late)
    policy = make_policy()
    with LLMCollector(
        env, policy=policy, groups_per_batch=2, replay_buffer=buffer, max_staleness=max_staleness
    ) as collector:
        collector.start()
        wait_until(lambda: len(buffer) >= 4 * (max_staleness + 1))
        time.sleep(0.1)
        assert len(buffer) == 4 * (max_staleness + 1)  # and still no more than the bound


# Groups without signal: decided by what compares, and no batch is empty


def always_right(completion):
    return 1.0


def rare(completion, answer):
    """One group in seven has a right answer."""
    return float(completion == "1" and int(answer) % 7 == 0)


@pytest.mark.parametrize(
    ("staleness", "postproc"),
    [(None, MCAdvantage), (2, MCAdvantage), (None, lambda: TopKRewardSelector(4, 2).select)],
    ids=["on demand", "ahead", "selection"],
)
def test_no_batch_is_empty_and_a_short_one_says_why(make_policy, staleness, postproc):
    policy, seen = make_policy(), Counter()
    with LLMCollector(
        addition(reward=rare), policy=policy, groups_per_batch=2, postproc=postproc(), max_staleness=staleness
    ) as collector:
        for version, batch in enumerate(itertools.islice(collector, 4)):
            assert batch.shape[0] > 0
            report = collector.report
            kept = set(batch["rollout", "rollout_id"])
            rollouts = {rollout.rollout_id: rollout for rollout in collector.rollouts}
            assert report.num_rollouts == len(collector.rollouts) == len(rollouts)
            assert report.to_metrics()["num_dropped"] == len(rollouts) - len(kept)  # those that are not trained on
            without_signal = [one for one in rollouts.values() if int(one.columns["answer"]) % 7]
            assert report.num_dropped_by_reason[DropReason.CONSTANT_REWARDS] == len(without_signal)
            assert report.mean_reward == pytest.approx(sum(one.reward for one in rollouts.values()) / len(rollouts))
            seen.update(list(rollouts))
            policy.engine.policy_version = version + 1
    assert set(seen.values()) == {1}


def test_a_batch_is_full_where_the_decision_is_handed_to_the_collector(make_policy):
    advantages = MCAdvantage(4)
    rules = GroupRules(group_filter=advantages.has_signal)
    with LLMCollector(
        addition(reward=rare), policy=make_policy(), groups_per_batch=2, postproc=advantages, group_rules=rules
    ) as collector:
        batch = collector.next()
        assert set(batch["rollout", "group_id"]) == {"train/0/6", "train/0/13"}
        assert collector.report.num_dropped_by_reason == {DropReason.CONSTANT_REWARDS: 4 * 12}


def test_components_have_signal_where_their_sum_has_none(make_policy):
    class Both(Rubric):
        async def score_group(self, rollouts):
            return [Score(1.0, {"right": float(index % 2), "short": float(1 - index % 2)}) for index in range(4)]

        is_group_scored = True

    env = DatasetChatEnv(DATASET, repeats=4).append_transform(RubricReward(Both(exact)))
    weights = {"right": 1.0, "short": 0.1}
    for advantages in (MCAdvantage(component_weights=weights), MCAdvantage(normalization="none")):
        rules = GroupRules(group_filter=advantages.has_signal)
        with LLMCollector(
            env, policy=make_policy(), groups_per_batch=1, postproc=advantages, group_rules=rules
        ) as collector:
            assert len(collector.next()) == 4 and collector.report.num_dropped_by_reason == {}


@pytest.mark.parametrize("is_full", [False, True])
def test_nothing_but_groups_without_signal_warns_and_then_raises_with_the_reason(
    make_policy, caplog, monkeypatch, is_full
):
    monkeypatch.setattr("llmrl.collectors.base.SIGNAL_PATIENCE", 4)
    monkeypatch.setattr("llmrl.collectors.scheduler.SIGNAL_PATIENCE", 4)
    advantages = MCAdvantage()
    rules = GroupRules(group_filter=advantages.has_signal) if is_full else None
    env = addition(1, always_right)
    with LLMCollector(
        env, policy=make_policy(), groups_per_batch=2, postproc=advantages, group_rules=rules
    ) as collector:
        with pytest.raises(CollectionStalled, match=r"16 groups in a row.*'constant_rewards': 16"):
            collector.next()
    assert caplog.text.count("nothing to train on") == 3


def test_a_failed_member_is_in_the_report_of_its_groups_batch(make_policy):
    def fails_once_a_group(completion, answer):
        if completion == "3":
            raise RuntimeError("a broken judge")
        return float(completion == "1")

    policy = make_policy(["1<|im_end|>", "2<|im_end|>", "3<|im_end|>", "4<|im_end|>"])
    arguments = {"groups_per_batch": 1, "max_staleness": 3, "max_concurrent_rollouts": 1}
    with LLMCollector(addition(reward=fails_once_a_group), policy=policy, **arguments) as collector:
        collector.next()
        wait_until(lambda: len(policy.engine.requests) >= 16)
        for batch in itertools.islice(collector, 3):  # groups that were played ahead
            assert {one.group_id for one in collector.rollouts} == set(batch["rollout", "group_id"])
            assert collector.report.num_rollouts == 4 and sum(collector.report.num_dropped_by_reason.values()) == 1


def test_what_was_dropped_before_the_data_ended_is_in_a_report(make_policy):
    env = addition(2, rare, size=15, num_epochs=1)
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1, postproc=MCAdvantage()) as collector:
        reports = [collector.report for _ in collector]
        assert collector.report is not reports[-1]  # the last with signal has the answer 14, of 15
        reports.append(collector.report)
    assert sum(report.num_rollouts for report in reports) == 30
    assert sum(report.num_dropped_by_reason["constant_rewards"] for report in reports) == 30 - 2 * 2
