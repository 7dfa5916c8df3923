"""The collector while others work: bounded staleness, background buffer, pauses, updates in flight, faults."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from waiting import wait_until
from warm_processes import WarmPopen

from llmrl.collectors import CollectionStalled, DropReason, GroupRules, LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus, StopReason
from llmrl.engines import EngineReplicas
from llmrl.envs import DatasetChatEnv, MessageChatEnv, MessageEnv, MessageStep
from llmrl.objectives import MCAdvantage
from llmrl.policies import LLMWrapperBase
from llmrl.rewards import RewardFn, Rubric
from llmrl.testing import ScriptedEngine
from llmrl.transforms import RubricReward

DATASET = [{"query": f"{n} + 1 =", "answer": str(n + 1)} for n in range(50)]


@pytest.fixture
def make_policy(renderer):
    def make(script=("1<|im_end|>", "2<|im_end|>"), generate_kwargs=None, **engine_kwargs):
        engine = ScriptedEngine(script, encode=renderer.encode, decode=renderer.decode, **engine_kwargs)
        return LLMWrapperBase(engine, renderer=renderer, generate_kwargs=generate_kwargs)

    return make


def exact(completion, answer):
    return float(completion == answer)


def addition(repeats=2, rubric=exact, **kwargs):
    return DatasetChatEnv(DATASET, repeats=repeats, **kwargs).append_transform(RubricReward(rubric))


def settled(collector):
    """Numbers in = numbers out: the rollouts of all batches so far, each once."""
    return Counter(rollout.rollout_id for rollout in collector.rollouts)


class Talk(MessageEnv):
    """Answers `num_turns` times."""

    def __init__(self, item):
        self.num_turns, self.turn = item.get("num_turns", 2), 0

    async def init(self):
        return [{"role": "user", "content": "go"}]

    async def step(self, message):
        self.turn += 1
        return MessageStep([{"role": "user", "content": "again"}], reward=1.0, is_done=self.turn >= self.num_turns)


# Groups


def test_dropped_groups_are_refilled_exactly_and_counted(make_policy):
    def every_third_is_constant(completion, answer):
        return 0.0 if int(answer) % 3 == 0 else float(completion == "1")

    rules = GroupRules(group_filter=MCAdvantage().has_signal)
    with LLMCollector(
        addition(rubric=every_third_is_constant),
        policy=make_policy(),
        groups_per_batch=2,
        group_rules=rules,
        max_concurrent_rollouts=1,
    ) as collector:
        seen = Counter()
        for _, batch in zip(range(4), collector, strict=False):
            assert len(set(batch["rollout", "group_id"])) == 2 and len(batch) == 4
            seen += settled(collector)
            dropped = collector.report.num_dropped_by_reason
            assert set(dropped) <= {DropReason.CONSTANT_REWARDS}
            assert collector.report.num_rollouts == 4 + sum(dropped.values())
    assert set(seen.values()) == {1}  # nothing twice
    assert sorted(seen) == sorted(f"train/0/{group}/{sample}" for group in range(11) for sample in range(2))


def test_numbers_with_which_nothing_would_ever_end_well_are_refused(make_policy):
    with pytest.raises(ValueError, match="num_extra_groups must be at least 0, got -1"):
        LLMCollector(addition(1), policy=make_policy(), groups_per_batch=2, num_extra_groups=-1)
    rules = GroupRules(min_survivors=3)
    with pytest.raises(ValueError, match="min_survivors=3 drops every group, since a group has 2 rollouts"):
        LLMCollector(addition(2), policy=make_policy(), groups_per_batch=2, group_rules=rules)
    with LLMCollector(addition(2), policy=make_policy(), groups_per_batch=2) as collector:
        with pytest.raises(ValueError, match="num_rollouts must be at least 1, got 0"):
            collector.play(0)
    for limit in ("rollout_timeout_seconds", "step_timeout_seconds"):
        with pytest.raises(ValueError, match=f"{limit} must be positive, got 0"):
            RolloutLimits(**{limit: 0})


def test_extra_groups_spare_the_wait_for_the_slowest(make_policy):
    policy = make_policy(latency_s=lambda prompt, answer: math.inf if len(policy.engine.requests) == 1 else 0.01)
    with LLMCollector(addition(1), policy=policy, groups_per_batch=3, num_extra_groups=1) as collector:
        batch = next(iter(collector))
        assert "train/0/0" not in list(batch["rollout", "group_id"]) and len(batch) == 3
        assert collector.report.num_dropped_by_reason == {DropReason.OVERSAMPLED: 1}
        aborted = [rollout for rollout in collector.rollouts if rollout.status is RolloutStatus.ABORTED]
        assert [rollout.rollout_id for rollout in aborted] == ["train/0/0/0"]
        wait_until(lambda: policy.engine.num_in_flight == 0)  # no leaked slot


def test_a_token_budget_bounds_batches_of_whole_groups(make_policy):
    with LLMCollector(addition(), policy=make_policy(), tokens_per_batch=150) as collector:
        for _, batch in zip(range(3), collector, strict=False):
            assert sum(row["tokens", "full"].shape[0] for row in batch.unbind(0)) <= 150
            assert set(Counter(batch["rollout", "group_id"]).values()) == {2}


def test_the_end_of_the_data_gives_what_is_left_then_stops(make_policy):
    env = DatasetChatEnv(DATASET[:5], repeats=2, num_epochs=1).append_transform(RubricReward(exact))
    with LLMCollector(env, policy=make_policy(), groups_per_batch=2) as collector:
        batches = [list(batch["rollout", "rollout_id"]) for batch in collector]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert len({rollout_id for batch in batches for rollout_id in batch}) == 10


def test_trajectories_may_be_collected_ahead(make_policy):
    env = MessageChatEnv(Talk, [{"num_turns": 3}])
    policy = make_policy(latency_s=0.02)
    with LLMCollector(
        env, policy=policy, yield_completed_trajectories=True, dialog_turns_per_batch=4, max_concurrent_rollouts=6
    ) as collector:
        sizes = [batch.shape[0] for _, batch in zip(range(4), collector, strict=False)]
    assert sizes == [6] * 4  # whole conversations, until there are four turns


# Staleness


def test_collection_goes_on_while_the_trainer_trains_but_only_so_far(make_policy):
    policy = make_policy()
    with LLMCollector(addition(), policy=policy, groups_per_batch=2, max_staleness=1) as collector:
        batches = iter(collector)
        next(batches)
        wait_until(lambda: len(policy.engine.requests) == 8)
        time.sleep(0.1)
        assert len(policy.engine.requests) == 8  # this batch and one ahead
        for version in range(1, 6):
            policy.engine.policy_version = version
            batch = next(batches)
            versions = batch.get(("policy_versions", "full"), as_list=True)
            oldest = min(int(row[row >= 0].min()) for row in versions)
            assert version - oldest <= 1
            assert collector.report.max_staleness <= 1 and collector.report.num_dropped_by_reason == {}


def test_with_staleness_zero_nothing_starts_before_the_update(make_policy):
    policy = make_policy()
    with LLMCollector(addition(), policy=policy, groups_per_batch=2, max_staleness=0) as collector:
        batches = iter(collector)
        next(batches)
        time.sleep(0.1)
        assert len(policy.engine.requests) == 4
        policy.engine.policy_version = 1
        batch = next(batches)
        versions = torch.cat(batch.get(("policy_versions", "full"), as_list=True))
        assert set(versions[versions >= 0].tolist()) == {1}


def test_groups_that_a_second_update_made_too_old_are_dropped_and_refilled(make_policy):
    policy = make_policy()
    with LLMCollector(addition(), policy=policy, groups_per_batch=2, max_staleness=1) as collector:
        batches = iter(collector)
        next(batches)
        wait_until(lambda: policy.engine.num_in_flight == 0 and len(policy.engine.requests) == 8)
        policy.engine.policy_version = 5
        batch = next(batches)
        assert collector.report.num_dropped_by_reason == {DropReason.STALE: 4}
        assert len(batch) == 4 and collector.report.max_staleness == 0


# Updates in flight


class HeldUpdates:
    """A scheme and its sender: the engine has the next weights when they arrive."""

    def create_sender(self):
        return self

    def register_model(self, model):
        pass

    def init_all_workers_group(self, metadata, engine):
        self.engine = engine

    def update_weights(self):
        self.engine.policy_version += 1
        return self.engine.policy_version

    def start_update(self):
        self.update = Future()
        return self.update

    def arrive(self):
        self.update.set_result(self.update_weights())

    def shutdown(self):
        pass


@pytest.fixture
def updated_meanwhile(make_policy):
    @contextlib.contextmanager
    def collecting(max_staleness):
        policy, updates = make_policy(), HeldUpdates()
        options = {"groups_per_batch": 2, "max_staleness": max_staleness, "weight_sync_schemes": {"policy": updates}}
        with LLMCollector(addition(), policy=policy, **options) as collector:
            yield collector, updates

    return collecting


@pytest.mark.parametrize("max_staleness", [None, 0, 1, 2])
def test_batches_are_as_fresh_as_promised_while_the_engines_load(updated_meanwhile, max_staleness):
    model = torch.nn.Linear(1, 1)
    with updated_meanwhile(max_staleness) as (collector, updates):
        batches = iter(collector)
        next(batches)
        for version in range(1, 7):
            collector.start_update(model)
            assert collector.policy_version == version and updates.engine.policy_version == version - 1
            threading.Timer(0.02, updates.arrive).start()
            batch = next(batches)
            oldest = min(int(row[row >= 0].min()) for row in batch.get(("policy_versions", "full"), as_list=True))
            assert version - oldest <= collector.report.max_staleness <= (max_staleness or 0)
            assert updates.update.result(60) == version


def test_nothing_starts_with_weights_that_are_being_replaced(updated_meanwhile):
    with updated_meanwhile(1) as (collector, updates):
        batches = iter(collector)
        next(batches)
        engine = collector.policy.engine
        wait_until(lambda: engine.num_in_flight == 0 and len(engine.requests) == 8)
        update = collector.start_update(torch.nn.Linear(1, 1))
        next(batches)
        time.sleep(0.1)
        assert len(engine.requests) == 8 and not update.done()
        updates.arrive()
        wait_until(lambda: len(engine.requests) == 12)
        assert update.result(60) == 1


def test_an_update_that_failed_is_raised_by_the_next_batch_unless_another_one_follows(updated_meanwhile):
    model = torch.nn.Linear(1, 1)
    with updated_meanwhile(0) as (collector, updates):
        batches = iter(collector)
        next(batches)
        update = collector.start_update(model)
        threading.Timer(0.05, lambda: updates.update.set_exception(RuntimeError("no way"))).start()
        with pytest.raises(RuntimeError, match="no way"):
            next(batches)
        with pytest.raises(RuntimeError, match="no way"):
            update.result(60)
        assert collector.policy_version == 0
        for repeat in (lambda: collector.update_policy_weights_(), lambda: collector.start_update()):
            update = collector.start_update()
            updates.update.set_exception(RuntimeError("no way"))
            with pytest.raises(RuntimeError, match="no way"):
                update.result(60)
            repeat()
        updates.arrive()
        batch = collector.next()
        assert {int(row.max()) for row in batch.get(("policy_versions", "full"), as_list=True)} == {2}


@pytest.mark.parametrize("grammar", [None, "{}"])
def test_aborted_completions_go_on_after_an_update_with_their_versions(make_policy, renderer, clock, grammar):
    full = renderer.encode("1 2 3 4 5 6 7 8 9 10 11 12<|im_end|>")
    opening = renderer.render([{"role": "user", "content": "0 + 1 ="}], add_generation_prompt=True)

    def script(prompt):
        return full[len(prompt) - len(opening) :]  # goes on where the prompt ends

    seconds = [4000.0]  # of a request, so that none has ended when the update comes
    are_started = threading.Event()

    def latency_s(prompt_ids, token_ids):
        if len(engine.requests) == 2:
            asyncio.get_running_loop().call_soon(are_started.set)  # after this request, the second one
        return seconds[0]

    policy = make_policy(script, latency_s=latency_s)
    policy.sampling = policy.sampling.with_changes(grammar=grammar)
    with LLMCollector(addition(), policy=policy, groups_per_batch=1) as collector:
        engine = policy.engine

        def update():
            assert are_started.wait(240)
            clock.move(1000)  # a quarter of the tokens
            seconds[0] = 0.0
            engine.pause("abort")
            engine.policy_version = 1
            engine.resume()

        thread = threading.Thread(target=update)
        thread.start()
        batch = next(iter(collector))
        thread.join()
    for row in batch.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        assert row["tokens", "full"][mask].tolist() == full
        versions = row["policy_versions", "full"][mask].tolist()
        # A grammar begins at the first token, so such an answer is sampled anew.
        assert versions == sorted(versions) and set(versions) == ({0, 1} if grammar is None else {1})
    assert len(engine.requests) == 4


# The background


def fill(policy, *, size=1000, **kwargs):
    buffer = ReplayBuffer(storage=LazyStackStorage(size), batch_size=4)
    return buffer, LLMCollector(addition(), policy=policy, groups_per_batch=2, replay_buffer=buffer, **kwargs)


def test_a_buffer_fills_in_the_background_and_pauses(make_policy):
    policy = make_policy(latency_s=0.005)
    buffer, collector = fill(policy, max_concurrent_rollouts=8)
    with collector:
        collector.start()
        wait_until(lambda: len(buffer) >= 12)
        with collector.pause():
            wait_until(lambda: policy.engine.num_in_flight == 0)
            num_written, num_requests = len(buffer), len(policy.engine.requests)
            time.sleep(0.1)
            assert (len(buffer), len(policy.engine.requests)) == (num_written, num_requests)
        wait_until(lambda: len(buffer) > num_written)
        assert collector.is_running()
    ids = [str(buffer[index]["rollout", "rollout_id"]) for index in range(len(buffer))]
    assert len(set(ids)) == len(ids) and not collector.is_running()


def test_a_collector_may_be_shut_down_within_a_pause(make_policy):
    collector = LLMCollector(addition(), policy=make_policy(), groups_per_batch=1)
    collector.next()
    with collector.pause():
        collector.shutdown()
    assert not collector.is_initialized()


def test_a_consumer_slower_than_the_producer_is_waited_for(make_policy):
    policy = make_policy()
    buffer, collector = fill(policy, max_staleness=2)
    with collector:
        collector.start()
        wait_until(lambda: len(buffer) == 12)
        time.sleep(0.2)
        assert len(buffer) == 12  # the bound: three batches for versions 0, 1 and 2
        policy.engine.policy_version = 1
        wait_until(lambda: len(buffer) == 16)


def test_what_ends_the_background_is_raised(make_policy):
    rules = GroupRules(rollout_filter=lambda rollout: False)
    _, collector = fill(make_policy(), group_rules=rules)
    with collector:
        collector.start()
        with pytest.raises(CollectionStalled, match="filtered"):
            wait_until(lambda: not collector.is_running())


@pytest.mark.parametrize("max_staleness", [None, 1])
def test_a_collector_that_fills_its_buffer_is_not_iterated(make_policy, max_staleness):
    _, collector = fill(make_policy(), max_staleness=max_staleness)
    with collector:
        collector.start()
        for read in (lambda: next(iter(collector)), collector.next):
            with pytest.raises(RuntimeError, match=r"filling its buffer since start\(\).* sample the buffer in place"):
                read()


def test_start_needs_a_buffer(make_policy):
    with LLMCollector(addition(), policy=make_policy(), groups_per_batch=2) as collector:
        with pytest.raises(RuntimeError, match="replay_buffer"):
            collector.start()


# Faults: numbers in = numbers out


def test_a_slow_tool_holds_up_no_other_conversation(make_policy, clock):
    class Slow(Talk):
        async def step(self, message):
            if self.num_turns == 1:
                while not collector.num_played:  # the other conversation
                    await asyncio.sleep(0.001)
                clock.move(3600)
            return await super().step(message)

    env = MessageChatEnv(Slow, [{"num_turns": 1}, {"num_turns": 10}])
    with LLMCollector(env, policy=make_policy(), groups_per_batch=1) as collector:
        slow, quick = collector.play(2)
    assert slow.seconds >= 3600 > quick.seconds and quick.num_turns == 10


@pytest.mark.slow
def test_a_tool_that_blocks_its_thread_times_out_and_the_rest_goes_on(make_policy, clock):
    may_go_on = threading.Event()

    class Blocking(Talk):
        async def step(self, message):
            if self.num_turns == 99:
                clock.pass_limit(600)
                assert may_go_on.wait(240)
            return await super().step(message)

    env = MessageChatEnv(Blocking, [{"num_turns": 99}, {"num_turns": 2}, {"num_turns": 2}])
    with LLMCollector(
        env, policy=make_policy(), groups_per_batch=1, limits=RolloutLimits(step_timeout_seconds=600)
    ) as collector:
        hung = collector.play(1)[0]
        fine = collector.play(2)
        may_go_on.set()
    assert (hung.status, hung.reason) == (RolloutStatus.ERROR, StopReason.ENVIRONMENT_ERROR)
    assert "more than 600 s" in hung.error
    assert [rollout.status for rollout in fine] == [RolloutStatus.COMPLETED] * 2


def test_a_judge_that_times_out_costs_its_rollout_alone(make_policy, clock):
    async def judge(completion):
        if completion == "2":
            clock.pass_limit(600)
            await asyncio.Event().wait()
        return 1.0

    rubric = Rubric(RewardFn(judge), timeout_seconds=600)
    policy = make_policy(["1<|im_end|>", "2<|im_end|>"])
    with LLMCollector(addition(2, rubric), policy=policy, groups_per_batch=2, max_concurrent_rollouts=1) as collector:
        batch = next(iter(collector))
        assert len(batch) == 2 and batch["next", "reward"].flatten().tolist() == [1.0, 1.0]
        assert len(collector.rollouts) == 4
        assert collector.report.num_dropped_by_reason == {DropReason.UNSCORED: 2}
        failed = [rollout for rollout in collector.rollouts if not rollout.is_scored]
        assert all("TimeoutError" in rollout.error for rollout in failed)


def test_judges_of_different_rollouts_run_at_once(make_policy):
    all_are_here = asyncio.Barrier(16)

    async def judge(completion):
        await all_are_here.wait()
        return float(completion == "1")

    with LLMCollector(
        addition(2, judge), policy=make_policy(), groups_per_batch=8, max_concurrent_rollouts=16
    ) as collector:
        batch = next(iter(collector))
    assert sorted(batch["next", "reward"].flatten().tolist()) == [0.0] * 8 + [1.0] * 8
    assert set(batch["reward_breakdown", "judge"].flatten().tolist()) == {0.0, 1.0}


def test_every_rollout_is_accounted_for_whatever_breaks(make_policy):
    class Breaking(Talk):
        async def step(self, message):
            if self.turn == 1 and self.num_turns == 3:
                raise RuntimeError("broken tool")
            return await super().step(message)

    env = MessageChatEnv(Breaking, [{"num_turns": n % 4 + 1} for n in range(40)], repeats=4)
    policy = make_policy(latency_s=0.001)
    seen, delivered, num_dropped = Counter(), 0, 0
    limits = RolloutLimits(num_engine_retries=0)
    with LLMCollector(env, policy=policy, groups_per_batch=4, limits=limits) as collector:
        for index, batch in zip(range(6), collector, strict=False):
            policy.engine.fail_next(index)
            seen += settled(collector)
            delivered += len(batch)
            num_dropped += sum(collector.report.num_dropped_by_reason.values())
        wait_until(lambda: policy.engine.num_in_flight == 0)
    assert set(seen.values()) == {1} and len(seen) == delivered + num_dropped
    assert len(seen) % 4 == 0 and num_dropped > 0


def test_a_replica_that_dies_costs_retries_and_nothing_else(renderer):
    engines = [
        ScriptedEngine(["1<|im_end|>"], encode=renderer.encode, latency_s=latency_s)
        for latency_s in (math.inf, 0.1, 0.1)
    ]
    policy = LLMWrapperBase(EngineReplicas(engines), renderer=renderer)
    with LLMCollector(addition(4), policy=policy, groups_per_batch=6) as collector:

        def die():
            wait_until(lambda: engines[0].num_in_flight > 0)
            engines[0].shutdown()

        thread = threading.Thread(target=die)
        thread.start()
        seen = Counter(collector.next()["rollout", "rollout_id"])
        thread.join()
        seen.update(collector.next()["rollout", "rollout_id"])
        assert collector.report.num_dropped_by_reason == {}
    assert seen == Counter(f"train/0/{group}/{sample}" for group in range(12) for sample in range(4))
    assert all(engine.num_in_flight == 0 for engine in engines)


def test_an_interrupted_wait_loses_no_batch(make_policy):
    def stop(number, frame):
        raise KeyboardInterrupt

    def interrupt():
        wait_until(lambda: policy.engine.num_in_flight == 2)
        time.sleep(0.1)  # the wait for the batch has begun, too
        os.kill(os.getpid(), signal.SIGUSR1)

    policy = make_policy()
    policy.engine.pause()
    with LLMCollector(addition(), policy=policy, groups_per_batch=1) as collector:
        previous = signal.signal(signal.SIGUSR1, stop)  # SIGALRM is the tests' time limit
        thread = threading.Thread(target=interrupt)
        try:
            with pytest.raises(KeyboardInterrupt):
                thread.start()
                collector.next()
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, previous)
        policy.engine.resume()
        assert list(collector.next()["rollout", "group_id"]) == ["train/0/0"] * 2
    assert len(policy.engine.requests) == 2


def test_shutdown_with_work_in_flight_is_prompt_and_closes_environments(make_policy):
    closed, others = [], set(threading.enumerate())

    class Closing(Talk):
        async def close(self):
            closed.append(self)

    env = MessageChatEnv(Closing, [{"num_turns": 1000}])
    policy = make_policy(latency_s=math.inf)
    buffer = ReplayBuffer(storage=LazyStackStorage(100))
    collector = LLMCollector(env, policy=policy, groups_per_batch=4, replay_buffer=buffer, max_concurrent_rollouts=4)
    collector.start()
    wait_until(lambda: policy.engine.num_in_flight == 4)
    collector.shutdown()
    collector.shutdown()
    assert policy.engine.num_in_flight == 0 and len(closed) == 4
    own = set(threading.enumerate()) - others
    assert not [thread for thread in own if thread.name in ("llmrl-collector", "llmrl-buffer")]


def test_shutdown_while_a_batch_is_being_written_waits_for_that_batch_alone(make_policy):
    class Slow(ReplayBuffer):
        is_writing, may_write = threading.Event(), threading.Event()

        def extend(self, data):
            self.is_writing.set()
            assert self.may_write.wait(240)
            return super().extend(data)

    buffer = Slow(storage=LazyStackStorage(100))
    collector = LLMCollector(addition(), policy=make_policy(), groups_per_batch=2, replay_buffer=buffer)
    collector.start()
    assert buffer.is_writing.wait(240)
    stop = collector._scheduler.stop

    async def stop_and_write():
        await stop()
        buffer.may_write.set()
        await asyncio.sleep(0.2)  # the batch is written, and the next one asked for

    collector._scheduler.stop = stop_and_write
    collector.shutdown()
    assert len(buffer) == 4 and not collector.is_running()  # which would raise what ended the filling


HEAD = """
    import os, pickle, signal, sys, time
    sys.path[:0] = {path!r}
    from torchrl.data import LazyStackStorage, ReplayBuffer
    from llmrl.collectors import LLMCollector, RolloutLimits
    from llmrl.testing import ScriptedEngine
    from llmrl.envs import DatasetChatEnv
    from llmrl.policies import LLMWrapperBase

    def make_collector(**arguments):
        env = DatasetChatEnv([{{"query": [5]}}] * 7, input_mode="tokens", repeats=2)
        policy = LLMWrapperBase(ScriptedEngine([[1, 2]], latency_s=0.01), input_mode="tokens")
        limits = RolloutLimits(max_turns=1)
        return LLMCollector(env, policy=policy, groups_per_batch=2, limits=limits, **arguments)
"""
IN_THE_BACKGROUND = """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # not there where a shell runs the tests in the background
    buffer = ReplayBuffer(storage=LazyStackStorage(100000))
    with make_collector(replay_buffer=buffer) as collector:
        collector.start()
        while len(buffer) < 8:
            time.sleep(0.01)
        print("collecting", flush=True)
        time.sleep(60)
"""
STEP_BY_STEP = """
    seen, file = [], {file!r}
    with make_collector(max_staleness=2) as collector:
        for index, batch in enumerate(collector):
            seen += list(batch["rollout", "rollout_id"])
            with open(file + ".new", "wb") as new:
                pickle.dump((seen, collector.state_dict()), new)
            os.replace(file + ".new", file)
            if index == 3:
                print("collecting", flush=True)
"""


def is_session_alive(session):
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def end_while_collecting(code, how):
    process = WarmPopen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "collecting\n", process.stderr.read()
    process.send_signal(how)
    _, errors = process.communicate(timeout=240)
    assert process.returncode != 0
    wait_until(lambda: not is_session_alive(process.pid))
    return errors


def test_ctrl_c_ends_a_collector_in_the_background_and_leaves_no_process_behind(own_programs):
    code = textwrap.dedent((HEAD + IN_THE_BACKGROUND).format(path=sys.path))
    assert "KeyboardInterrupt" in end_while_collecting(code, signal.SIGINT)


def test_a_killed_collector_goes_on_from_its_last_state_and_nothing_is_lost_or_twice(tmp_path, own_programs):
    file = str(tmp_path / "state")
    code = textwrap.dedent((HEAD + STEP_BY_STEP).format(path=sys.path, file=file))
    end_while_collecting(code, signal.SIGKILL)
    seen, state = pickle.loads((tmp_path / "state").read_bytes())
    assert len(seen) >= 16 and len(state["env"]["prompts"]["again"]) > 0  # groups in flight went down with it
    names: dict = {}
    exec(textwrap.dedent(HEAD.format(path=[])), names)
    with names["make_collector"](max_staleness=2) as collector:
        collector.load_state_dict(state)
        while len(seen) < 64:
            seen += list(collector.next()["rollout", "rollout_id"])
    # Which groups are in a batch depends on which are quickest; all but those in flight are there, and none twice.
    assert set(Counter(seen).values()) == {1}
    drawn = [f"train/{group // 7}/{group % 7}/{sample}" for group in range(32 + 6) for sample in range(2)]
    assert set(seen) <= set(drawn) and set(drawn[:52]) <= set(seen)


# State


def test_groups_in_flight_at_a_kill_are_played_again_first(make_policy):
    policy = make_policy()
    with LLMCollector(addition(), policy=policy, groups_per_batch=2, max_staleness=2) as collector:
        delivered = list(collector.next()["rollout", "rollout_id"])
        wait_until(lambda: len(policy.engine.requests) == 12)
        state = collector.state_dict()
    assert len(state["env"]["prompts"]["again"]) == 8
    with LLMCollector(addition(), policy=make_policy(), groups_per_batch=2, max_staleness=2) as resumed:
        resumed.load_state_dict(state)
        for _ in range(4):
            delivered += list(resumed.next()["rollout", "rollout_id"])
    # Without the kill it would have been the same: each rollout of the first ten groups, once.
    assert Counter(delivered) == Counter(f"train/0/{group}/{sample}" for group in range(10) for sample in range(2))
