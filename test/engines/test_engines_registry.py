"""The registry: its readers reach the engines that serve, and those that replace a dead one."""

from __future__ import annotations

import asyncio
import functools
import time

import pytest
from waiting import wait_until

from llmrl.engines import EngineRegistry, EngineReplicas, RayEngine, SamplingConfig
from llmrl.testing import ScriptedEngine

pytest.importorskip("ray")

pytestmark = pytest.mark.usefixtures("ray_cluster")


def start(index, answer=7):
    return RayEngine.start(functools.partial(ScriptedEngine, [[answer]]), ray_options={"num_cpus": 0})


def ask(engines):
    return asyncio.run(engines.generate([5], SamplingConfig())).token_ids


def test_a_dead_engine_is_gone_round_and_its_successor_found(ray_cluster):
    registry = EngineRegistry.start()
    with EngineReplicas([start(0), start(1)]) as engines:
        registry.publish_once(engines)
        reached = registry.connect()
        assert ask(reached) == [7] and len(reached) == 2
        ray_cluster.kill(engines[0].actor)
        assert [ask(reached) for _ in range(4)] == [[7]] * 4
        engines._engines[0] = start(0, answer=8)  # what `restart` does in the trainer's process
        engines.refresh()
        registry.publish_once(engines)
        deadline = time.monotonic() + 240
        while len(reached.serving) < 2:
            assert time.monotonic() < deadline, "the successor was not found"
            time.sleep(0.05)
        assert {tuple(ask(reached)) for _ in range(8)} <= {(7,), (8,)}
        assert ask(EngineReplicas([reached[0]])) == [8]
        # A process that only reached an engine does not end it.
        reached.shutdown()
        assert ask(engines) in ([7], [8]) and engines[0].is_alive and engines[1].is_alive


def test_only_engines_that_others_can_reach_are_published():
    registry = EngineRegistry.start()
    with pytest.raises(TypeError, match="use_ray=True"):
        registry.publish_once(EngineReplicas([ScriptedEngine([[1]])]))
    with pytest.raises(RuntimeError, match="has no engine"):
        registry.connect()


def test_engines_that_die_together_have_two_successors(monkeypatch):
    class SlowNotice:
        """Takes long to compare, so that both look for their successors at once."""

        def __init__(self, name):
            self.name = name

        @property
        def actor(self):
            time.sleep(0.02)
            return self.name

    engines = {name: ScriptedEngine([[7]]) for name in "abcd"}
    served = ["a", "b"]
    monkeypatch.setattr(EngineRegistry, "_read", lambda self: [SlowNotice(name) for name in served])
    monkeypatch.setattr(RayEngine, "reach", lambda notice: engines[notice.name])
    reached = EngineRegistry(None).connect()
    served[:] = ["c", "d"]
    engines["a"].shutdown(), engines["b"].shutdown()
    wait_until(lambda: reached.serving == {0, 1})
    assert {id(engine) for engine in reached} == {id(engines["c"]), id(engines["d"])}
