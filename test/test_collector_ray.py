"""Collector actors on Ray: many collectors, one trainer; a killed actor costs retries, nothing else."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections import Counter

import pytest

ray = pytest.importorskip("ray")

from torchrl.data import LazyStackStorage, ReplayBuffer  # noqa: E402

from llmrl.collectors import RayLLMCollector, RolloutLimits  # noqa: E402
from llmrl.engines import ScriptedEngine  # noqa: E402
from llmrl.envs import DatasetChatEnv  # noqa: E402
from llmrl.policies import LLMWrapperBase  # noqa: E402

# Actors cannot import tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

GROUP_SIZE = 2
PROMPT = list(range(500))


pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_env():
    return DatasetChatEnv([{"query": PROMPT}] * 40, input_mode="tokens", repeats=GROUP_SIZE)


def make_policy(latency_s):
    def make():
        return LLMWrapperBase(ScriptedEngine([[1, 2, 3]], latency_s=latency_s), input_mode="tokens")

    return make


@pytest.fixture(scope="module")
def make_collector():
    def make(latency_s=0.0, **kwargs):
        return RayLLMCollector(
            make_env,
            policy_factory=make_policy(latency_s),
            num_collectors=2,
            groups_per_batch=4,
            limits=RolloutLimits(max_turns=1),
            num_cpus=0.1,
            **kwargs,
        )

    return make


@pytest.mark.slow
def test_a_killed_actor_costs_retries_and_nothing_else(make_collector):
    seen = Counter()
    with make_collector(latency_s=0.2) as collector:
        batches = iter(collector)
        batch = next(batches)
        assert len(batch) == 8
        seen.update(batch["rollout", "rollout_id"])
        # What travelled has its own size: no view of a conversation's growing ledger came along.
        row = batch[0]
        assert len(pickle.dumps(row)) < 40 * row["tokens", "full"].numel() + 8000
        assert row["tokens", "full"].tolist() == [*PROMPT, 1, 2, 3]
        assert row["tokens", "full"].untyped_storage().nbytes() == 8 * row["tokens", "full"].numel()
        victim = ray.get(collector._ray_source.actors[0].process_id.remote())
        for index in range(4):
            if index == 1:
                os.kill(victim, signal.SIGKILL)
            batch = next(batches)
            assert len(batch) == 8 and collector.report.num_dropped_by_reason == {}
            seen.update(batch["rollout", "rollout_id"])
        assert collector.num_restarts == 1
    assert seen == Counter(f"train/0/{group}/{sample}" for group in range(20) for sample in range(GROUP_SIZE))


@pytest.mark.slow
def test_a_buffer_is_filled_by_many_collectors_within_the_bound(make_collector):
    buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=4)
    with make_collector(replay_buffer=buffer, max_staleness=1) as collector:
        collector.start()
        deadline = time.monotonic() + 60
        while len(buffer) < 16:
            assert collector.is_running() and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.3)
        assert len(buffer) == 16  # two batches ahead of the first update
        collector.set_policy_version(1)
        while len(buffer) < 24:
            assert collector.is_running() and time.monotonic() < deadline
            time.sleep(0.05)
        state = collector.state_dict()
    assert state["env"]["prompts"]["position"] == 24 + 2 * len(set(state["env"]["prompts"]["again"])) // 2
    ids = [buffer[index]["rollout", "rollout_id"] for index in range(24)]
    assert len(set(ids)) == 24


def test_what_ray_cannot_do_is_refused(make_collector):
    with pytest.raises(ValueError, match="num_collectors"):
        RayLLMCollector(make_env, policy_factory=make_policy(0.0), num_collectors=0, groups_per_batch=1)
    with pytest.raises(ValueError, match="say what a batch is"):
        RayLLMCollector(make_env, policy_factory=make_policy(0.0))
