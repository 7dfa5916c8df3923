"""What other people's environments do wrong in this process ends their own rollouts, with the reason.

Workers of verifiers are in `test_envs_verifiers.py`, servers of OpenEnv in `test_envs_openenv.py`.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest
import textarena_stand_in
from openenv_server import GuessingServer
from waiting import patient

from llmrl.collectors import LLMCollector, RolloutLimits
from llmrl.data import RolloutStatus
from llmrl.envs import GymnasiumTextEnv, MessageChatEnv, OpenEnvChatEnv, ReasoningGymEnv, ToolEnv, make_textarena_env
from llmrl.envs.hubs import textarena
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine

FAULTS = ("raises", "exits", "nan", "hangs", "prints", "lacks a key")


def go_wrong(fault):
    """What an environment does; a number is its reward."""
    if fault == "raises":
        raise KeyError("no such move")
    if fault == "exits":
        raise SystemExit(3)
    if fault == "hangs":
        _released.wait(600)
    if fault == "prints":
        for _ in range(32):
            os.write(1, b"x" * (1 << 20))
    if fault == "lacks a key":
        os.environ["NO_SUCH_KEY"]
    return float("nan") if fault == "nan" else 1.0


_released = threading.Event()


class TextEnv:
    """A text environment of gymnasium's kind."""

    def __init__(self, fault):
        self.fault = fault

    def reset(self, seed=None):
        return "Move.", {}

    def step(self, action):
        return "", go_wrong(self.fault), True, False, {}


class ToolClass:
    """An environment as TRL's `environment_factory` takes it."""

    def reset(self, fault, **row):
        self.fault = fault

    def move(self) -> str:
        """Move."""
        return "moved"

    def get_reward(self):
        return go_wrong(self.fault)


class Heap(textarena_stand_in.Heap):
    """A game of which one goes wrong."""

    def step(self, action):
        if self.seed == 0:
            self.result = {0: go_wrong(type(self).fault)}
            return True, {}
        return super().step(action)

    def reset(self, num_players, seed=None):
        self.seed = seed
        super().reset(num_players, seed)


stand_in = textarena_stand_in.stand_in  # a fixture


def of_gymnasium(fault, monkeypatch, limit):
    rows = [{"fault": fault}, {"fault": ""}]
    return MessageChatEnv(lambda row: GymnasiumTextEnv(TextEnv(row["fault"])), rows)


def of_trl(fault, monkeypatch, limit):
    return ToolEnv(ToolClass, [{"prompt": "Move.", "fault": fault}, {"prompt": "Move.", "fault": ""}], timeout=limit)


def of_textarena(fault, monkeypatch, limit):
    monkeypatch.setattr(textarena_stand_in, "Heap", Heap)
    monkeypatch.setattr(textarena, "_HOLD_SECONDS", 0.2)
    Heap.fault = fault
    return make_textarena_env("Heap-v0", num_players=1, seeds=[0, 1])


def play(env, renderer, num_rollouts, answer="[2]", step_seconds=60.0):
    engine = ScriptedEngine(lambda prompt_ids: f"{answer}<|im_end|>", encode=renderer.encode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    limits = RolloutLimits(max_turns=9, step_timeout_seconds=step_seconds)
    options = {"groups_per_batch": 1, "max_concurrent_rollouts": 1, "limits": limits}
    with LLMCollector(env, policy=policy, **options) as collector:
        return collector.play(num_rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [of_gymnasium, of_trl, of_textarena])
def test_one_that_goes_wrong_ends_its_rollout_and_the_next_is_played(
    make, fault, renderer, monkeypatch, capfd, stand_in
):
    def attempt(limit):
        _released.clear()
        seconds = limit if fault == "hangs" else 60.0
        wrong, fine = play(make(fault, monkeypatch, seconds), renderer, 2, step_seconds=seconds)
        _released.set()
        return (wrong, fine) if fault != "hangs" or (fine.is_scored and not fine.error) else None

    began = time.monotonic()
    wrong, fine = patient(attempt, (1.0, 10.0, 60.0))
    assert time.monotonic() - began < 300
    assert fine.status is RolloutStatus.COMPLETED and fine.is_scored and fine.reward == 1.0, fine.error
    if fault == "prints":
        assert (wrong.status, wrong.reward) == (RolloutStatus.COMPLETED, 1.0)
        return
    reasons = {"raises": "no such move", "exits": "SystemExit: 3", "nan": "finite", "lacks a key": "NO_SUCH_KEY"}
    assert not wrong.is_scored
    assert reasons.get(fault, "imeout") in f"{wrong.error} {wrong.reason}"


@pytest.mark.parametrize("fault", ["raises", "nan"])
def test_a_scorer_of_reasoning_gym_that_goes_wrong_pays_nothing(fault, renderer, monkeypatch):
    factory = pytest.importorskip("reasoning_gym.factory")
    monkeypatch.setattr(factory, "get_score_answer_fn", lambda task: lambda answer, entry: go_wrong(fault))
    [rollout] = play(ReasoningGymEnv("chain_sum"), renderer, 1, "<answer>3</answer>")
    assert rollout.is_scored and rollout.reward == 0.0


def test_a_server_that_sends_a_gigabyte_is_hung_up_on(renderer, monkeypatch):
    server = GuessingServer()
    sent = []

    async def flood(self, question, ws):
        if question["type"] != "step":
            return await answer(self, question, ws)
        writer = ws._req.transport
        writer.write(b"\x81\x7f" + (1 << 30).to_bytes(8, "big"))  # a frame of this size follows
        for _ in range(1 << 10):
            if writer.is_closing():
                break
            writer.write(b"x" * (1 << 20))
            sent.append(1 << 20)
            while writer.get_write_buffer_size() and not writer.is_closing():
                await asyncio.sleep(0.001)
        return None

    answer = GuessingServer._answer
    monkeypatch.setattr(GuessingServer, "_answer", flood)
    [rollout] = play(OpenEnvChatEnv(server.url, [{"seed": 1}], timeout=120.0), renderer, 1, "3")
    server.close()
    assert rollout.status is RolloutStatus.ERROR and "ended the session" in rollout.error and sum(sent) < 1 << 28
