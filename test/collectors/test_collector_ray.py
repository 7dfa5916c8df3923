"""Collector actors on Ray: many collectors, one trainer; what is killed costs retries, nothing else."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from functools import partial

import pytest
import torch
from weight_sync_tools import log_prob_difference

ray = pytest.importorskip("ray")

from torchrl.data import LazyStackStorage, RayReplayBuffer  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from waiting import is_running, wait_until  # noqa: E402

from llmrl.collectors import RayLLMCollector, RolloutLimits  # noqa: E402
from llmrl.engines import EngineError, EngineReplicas  # noqa: E402
from llmrl.engines.ray.cluster import connect  # noqa: E402
from llmrl.engines.ray.registry import EngineRegistry  # noqa: E402
from llmrl.envs import DatasetChatEnv  # noqa: E402
from llmrl.policies import LLMWrapperBase  # noqa: E402
from llmrl.testing import ScriptedEngine  # noqa: E402
from llmrl.transforms import PolicyVersion  # noqa: E402
from llmrl.weight_sync import VLLMWeightSyncScheme  # noqa: E402

# Actors cannot import tests.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

GROUP_SIZE = 2
PROMPT = list(range(500))
NUM_TOKENS = 500

pytestmark = pytest.mark.usefixtures("ray_cluster")


def make_env():
    return DatasetChatEnv([{"query": PROMPT}] * 400, input_mode="tokens", repeats=GROUP_SIZE)


def make_policy(latency_s):
    def make():
        return LLMWrapperBase(ScriptedEngine([[1, 2, 3]], latency_s=latency_s), input_mode="tokens")

    return make


def make_collector(policy_factory, **arguments):
    arguments = {"limits": RolloutLimits(max_turns=1), "num_cpus": 0, **arguments}
    return RayLLMCollector(make_env, policy_factory=policy_factory, **arguments)


def every_rollout(num_groups):
    return Counter(f"train/0/{group}/{sample}" for group in range(num_groups) for sample in range(GROUP_SIZE))


def test_a_node_that_is_lost_costs_retries_and_nothing_else(ray_nodes):
    away = ray_nodes.add_node(num_cpus=0, resources={"seat": 1})
    ray.shutdown()  # so that the collector connects to the cluster's address
    seen = Counter()
    with make_collector(
        make_policy(0.5),
        num_collectors=2,
        groups_per_batch=4,
        remote_config={"resources": {"seat": 1}},
        ray_init_config={"address": ray_nodes.address, "log_to_driver": False},
    ) as collector:
        homes = ray.get([actor.__ray_call__.remote(lambda self: node_id()) for actor in collector.ray_source.actors])
        assert len(set(homes)) == 2
        assert away.node_id in homes
        batch = collector.next()
        assert len(batch) == 8
        seen.update(batch["rollout", "rollout_id"])
        # What travelled has its own size: no view of a conversation's growing ledger came along.
        row = batch[0]
        assert len(pickle.dumps(row)) < 40 * row["tokens", "full"].numel() + 8000
        assert row["tokens", "full"].tolist() == [*PROMPT, 1, 2, 3]
        assert row["tokens", "full"].untyped_storage().nbytes() == 8 * row["tokens", "full"].numel()
        threading.Timer(0.1, ray_nodes.remove_node, (away,), {"allow_graceful": False}).start()
        while not collector.num_restarts and len(seen) < 800:
            batch = collector.next()
            assert len(batch) == 8
            assert collector.report.num_dropped_by_reason == {}
            seen.update(batch["rollout", "rollout_id"])
        # There is no seat for it, and the other actor plays all; as long as Ray does not know that the node is lost, it
        # may place a successor there, which is lost as well.
        assert collector.num_restarts >= 1
        assert len(collector.play(3)) == 3
        with pytest.raises(RuntimeError, match="connected to"):
            connect({"address": "192.0.2.1:6379"})
    assert seen == every_rollout(len(seen) // GROUP_SIZE)
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)  # or Ray would place actors on the other


def node_id():
    import ray

    return ray.get_runtime_context().get_node_id()


def test_a_buffer_in_an_actor_is_filled_by_several_within_the_bound():
    buffer = RayReplayBuffer(storage=partial(LazyStackStorage, 1000), batch_size=4, remote_config={"num_cpus": 0})
    with make_collector(
        make_policy(0.0), num_collectors=2, groups_per_batch=4, replay_buffer=buffer, sync_iter=False
    ) as collector:
        collector.start()
        wait_until(lambda: len(buffer) == 16 or not collector.is_running())
        time.sleep(0.3)
        assert len(buffer) == 16  # two batches ahead of the first update
        collector.increment_version()
        wait_until(lambda: len(buffer) == 24 or not collector.is_running())
        state = collector.state_dict()
    assert state["env"]["prompts"]["position"] == 24 + 2 * len(set(state["env"]["prompts"]["again"])) // 2
    assert Counter(buffer[:]["rollout", "rollout_id"]) == every_rollout(12)
    buffer.close()


def processes_of(engine):
    """The engine's actor's process and vLLM's."""

    def find(self):
        [process] = self._engine.llm.engine_core.resources.engine_manager.processes
        return os.getpid(), process.pid

    return ray.get(engine.actor.__ray_call__.remote(find))


def registry_policy(registry):
    sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    return lambda: LLMWrapperBase(registry.connect(), input_mode="tokens", generate_kwargs=sampling)


def test_vllm_in_actors_survives_the_death_of_an_engine_and_of_a_collector(ray_nodes, tiny_model_path, real_vllm):
    """The trainer's engines, in actors; collectors reach them by a registry; both get new weights, and both die."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32).eval()
    options = {"max_model_len": 1024, "kv_cache_memory": 1 << 26, "cpu_threads": 1, "num_replicas": 1}
    cluster = {"use_ray": True, "ray_options": {"num_cpus": 0}, "ray_init_config": {"address": ray_nodes.address}}
    seen, pids = Counter(), set()
    with EngineReplicas.from_pretrained(tiny_model_path, **options, **cluster) as engines:
        [engine] = engines
        assert engines.get_tokenizer().decode([0]) == "<|endoftext|>"
        assert engine.reset_prefix_cache()
        with pytest.raises(EngineError, match="cannot open the trainer's memory"):
            engine.init_weight_transfer_engine({"path": "/nowhere", "num_bytes": 64})
        registry = EngineRegistry.start()
        registry.publish(engines)
        with make_collector(
            registry_policy(registry),
            num_collectors=1,
            dialog_turns_per_batch=8,
            engine=engines,
            weight_sync_schemes={"policy": VLLMWeightSyncScheme()},
        ) as collector:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(parameter.numel()))
            stale = log_prob_difference(model, engine)
            assert collector.update_policy_weights_(model) == 1 == engines.policy_version == collector.policy_version
            for victim in ("engine", "collector", None):
                collector_pid = ray.get(collector.ray_source.actors[0].process_id.remote())
                engine_pid, core_pid = processes_of(engines[0])
                pids |= {collector_pid, engine_pid, core_pid}
                if victim is not None:
                    pid = engine_pid if victim == "engine" else collector_pid
                    threading.Timer(0.4, os.kill, (pid, signal.SIGKILL)).start()
                batch = collector.next()
                assert len(batch) == 8
                assert collector.report.num_dropped_by_reason == {}
                for turn in batch.unbind(0):
                    assert turn["tokens", "response"].shape == (NUM_TOKENS,)
                    versions = turn["policy_versions", "full"]
                    assert set(versions[versions >= 0].tolist()) == {1}  # the engine that was restarted has it, too
                    seen[f"{turn['rollout', 'group_id']}/{int(turn['rollout', 'sample_index'])}"] += 1
            assert (collector.num_restarts, engines.num_restarts) == (1, 1)
            assert log_prob_difference(model, engines[0]) < min(0.15, stale / 2)
        assert seen == every_rollout(12)
    assert len(pids) == 6  # two collectors, two engines of two processes each
    wait_until(lambda: not any(map(is_running, pids)))


def test_what_ray_cannot_do_is_refused():
    with pytest.raises(ValueError, match="num_collectors"):
        make_collector(make_policy(0.0), num_collectors=0, groups_per_batch=1)
    with pytest.raises(ValueError, match="exactly one kind of batch"):
        make_collector(make_policy(0.0))
    with pytest.raises(ValueError, match="track_policy_version=True"):
        make_collector(make_policy(0.0), groups_per_batch=1, track_policy_version=PolicyVersion())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens_per_batch": 64, "max_staleness": 1}, "max_staleness needs batches of a known number"),
        ({"groups_per_batch": 1, "max_concurrent_rollouts": "auto"}, "max_concurrent_rollouts='auto' needs"),
        ({"groups_per_batch": 1, "max_staleness": 1, "late_groups": "wiat"}, "late_groups must be one of"),
        ({"groups_per_batch": 1, "late_groups": "wiat"}, "late_groups must be one of"),
        ({"groups_per_batch": 1, "late_groups": "drop"}, "late_groups='drop' needs max_staleness"),
        ({"groups_per_batch": 1, "max_staleness": -1}, "max_staleness must be at least 0"),
        ({"dialog_turns_per_batch": 4, "max_concurrent_rollouts": 0, "sync_iter": False}, "max_concurrent_rollouts"),
        ({"groups_per_batch": 1, "queue": []}, "put"),
    ],
)
def test_no_actor_starts_for_arguments_that_are_refused(tmp_path, arguments, message):
    started = tmp_path / "started"

    def make():
        started.touch()
        return make_policy(0.0)()

    with pytest.raises((ValueError, TypeError), match=message):
        make_collector(make, num_collectors=1, **arguments)
    assert not started.exists()


def test_last_steps_fill_the_environment_s_batch_size_by_default():
    env = partial(DatasetChatEnv, [{"query": PROMPT}] * 8, input_mode="tokens", batch_size=(4,))
    arguments = {"num_collectors": 1, "num_cpus": 0, "limits": RolloutLimits(max_turns=1)}
    with RayLLMCollector(env, policy_factory=make_policy(0.0), yield_only_last_steps=True, **arguments) as collector:
        assert len(collector.next()) == 4


def test_an_actor_stops_playing_a_group_that_is_dropped(tmp_path):
    def make():
        class Engine(ScriptedEngine):
            num_begun = 0

            async def generate(self, *args, **options):
                number = self.num_begun
                self.num_begun += 1
                try:
                    while number == 2 or self.num_begun < 3:  # no group is whole before the answer that never comes
                        await asyncio.sleep(0.01)
                    return await super().generate(*args, **options)
                except BaseException as error:
                    (tmp_path / type(error).__name__).touch()
                    raise

        return LLMWrapperBase(Engine([[1, 2, 3]]), input_mode="tokens")

    with make_collector(make, num_collectors=1, groups_per_batch=1, num_extra_groups=1) as collector:
        assert len(collector.next()) == GROUP_SIZE
        wait_until((tmp_path / "CancelledError").exists)
        assert collector.num_restarts == 0
        assert collector.play(1)[0].num_turns == 1  # the actor plays on
