"""Conversations of tau2-bench, with a stand-in for its package: what it pays, and what goes wrong.

The real one is played by `test/helpers/tau2_domains.py`, which needs a checkout.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hub_rows import play
from verifiers_environments import num_inexact

from llmrl.data import RolloutStatus
from llmrl.envs import Tau2Env, make_task_env
from llmrl.envs.hubs.virtual_env import InstallError, python_with

STAND_IN = Path(__file__).parents[1] / "helpers" / "tau2_stand_in"
USER = {"model": "openai/customer", "api_base": "http://127.0.0.1:9/v1"}
TASKS = ("fine", "dies", "hangs", "prints", "nan", "raises", "user")


@pytest.fixture(scope="module", autouse=True)
def installed(own_programs):
    try:
        python_with([str(STAND_IN)])
    except InstallError as error:
        pytest.skip(f"the stand-in for tau2 cannot be installed here: {error}")


def test_tasks_pay_what_tau2_says_and_one_that_goes_wrong_ends_alone(monkeypatch):
    run_agent = Tau2Env.run_agent

    async def run_in_time(env, row, model):
        # The others have to end within it, although a worker may have to start.
        env.timeout_seconds = 1.0 if row["task_id"] == "hangs" else 240.0
        return await run_agent(env, row, model)

    monkeypatch.setattr(Tau2Env, "run_agent", run_in_time)
    env = make_task_env("tau2:desk", folder=STAND_IN, user=USER)
    env.grace_seconds = 0.5
    rollouts, engine = play(env, lambda prompt: "hello", len(TASKS), at_once=1)
    played = {one.columns["task_id"]: one for one in rollouts}
    [after], _ = play(env, lambda prompt: "goodbye", 1)
    env.close()
    assert tuple(played) == TASKS
    for name in ("fine", "prints"):
        assert (played[name].status, played[name].reward) == (RolloutStatus.COMPLETED, 1.0), played[name].error
    assert played["fine"].breakdown["DB"] == 1.0 and played["fine"].columns["scenario"] == "You are fine."
    assert (after.status, after.reward, after.is_scored) == (RolloutStatus.COMPLETED, 0.0, True)
    assert "SIGKILL" in played["dies"].error and "these were its last words" in played["dies"].error
    assert (played["hangs"].status, played["hangs"].reason) == (RolloutStatus.TRUNCATED, "timeout")
    reasons = {"nan": "the reward of 'nan'", "raises": "no such order", "user": "'user_error'"}
    for name, reason in reasons.items():
        assert not played[name].is_scored and reason in played[name].error, (name, played[name].error)
    assert num_inexact(rollouts, engine) == 0


def test_what_cannot_be_played_is_said_when_the_environment_is_made(tmp_path):
    with pytest.raises(ValueError, match="has no split 'dev', only base, test"):
        Tau2Env("desk", folder=STAND_IN, user=USER, split="dev")
    with pytest.raises(ValueError, match="user must have the entry `model`, such as 'openai/qwen', got"):
        Tau2Env("desk", folder=STAND_IN, user={"api_base": "http://127.0.0.1:9"})
    with pytest.raises(ValueError, match="checkout of tau2-bench"):
        Tau2Env("desk", folder=tmp_path, user=USER)
