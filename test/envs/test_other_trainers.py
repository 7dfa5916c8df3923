"""Trainers and clients of others play in an environment that is served: OpenEnv's, verifiers' and TRL's packages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
import sysconfig
import threading
from pathlib import Path

import pytest

from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import OpenEnvServer, VerifiersEnv, make_task_env
from llmrl.envs.hubs.virtual_env import InstallError, python_with
from llmrl.policies import LLMWrapperBase
from llmrl.testing import ScriptedEngine

OPENENV = "openenv>=0.10,<0.11"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-environments.md"
HELPERS = Path(__file__).parents[1] / "helpers"


@pytest.fixture(scope="module")
def openenv_python(own_programs):
    try:
        return python_with([OPENENV])
    except InstallError as error:
        pytest.skip(f"openenv cannot be installed here: {error}")


@contextlib.contextmanager
def served(env):
    """The URL of an environment, which a thread serves."""
    server, loop = OpenEnvServer(env), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result()
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def reward_here(renderer, env, position, answers):
    """The reward of a problem of the environment, and its first prompt, as a collector here has them."""
    env_prompts = env.prompts if hasattr(env, "prompts") else env.base_env.prompts
    env_prompts.draw_next([position])
    left = iter(answers)
    engine = ScriptedEngine(lambda prompt_ids: f"{next(left)}<|im_end|>", encode=renderer.encode)
    policy = LLMWrapperBase(engine, renderer=renderer)
    with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
        [rollout] = collector.play(1)
    assert rollout.status is RolloutStatus.COMPLETED
    return rollout.reward, [message["content"] for message in rollout.messages]


CLIENT = """
import json, sys
from openenv import GenericEnvClient
url, plan = sys.argv[1], json.loads(sys.argv[2])
played = []
for seed, answers in plan:
    with GenericEnvClient(base_url=url).sync() as env:
        result = env.reset(seed=seed)
        texts, reward = [one["content"] for one in result.observation["messages"]], 0.0
        for answer in answers:
            assert not result.done
            result = env.step({"content": answer})
            texts += [answer, *(one["content"] for one in result.observation["messages"])]
            reward += result.reward
        assert result.done, result
        played.append([reward, texts])
print(json.dumps(played))
"""
GUESSES = [f"<guess>{number}</guess>" for number in (1, 3, 5, 7, 9, 2, 4, 6, 8, 10)]


def test_openenvs_own_client_gets_what_a_collector_gets(openenv_python, renderer):
    plan = []
    expected = []
    for seed in (0, 3):
        reward, texts = reward_here(renderer, make_task_env("guess"), seed, GUESSES)
        plan.append([seed, [text for text in texts if text in GUESSES]])
        expected.append([reward, texts])
    with served(make_task_env("guess")) as url:
        words = [openenv_python, "-c", CLIENT, url, json.dumps(plan)]
        played = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(played.stdout) == [[pytest.approx(reward), texts] for reward, texts in expected]


def test_a_taskset_of_verifiers_plays_it(renderer, own_programs):
    """Its reward has been to OpenEnv and back: server, verifiers' taskset `openenv`, its worker, a collector."""
    resets = [{"seed": seed} for seed in range(4)]
    with served(make_task_env("guess")) as url:
        config = {"taskset": {"base_url": url, "resets": resets}}
        try:
            env = VerifiersEnv("openenv", requirements=["verifiers[openenv]"], config=config)
        except InstallError as error:
            pytest.skip(f"verifiers cannot be installed here: {error}")
        rollouts = []
        for _ in resets:
            left = iter(GUESSES)
            engine = ScriptedEngine(lambda prompt_ids, left=left: f"{next(left)}<|im_end|>", encode=renderer.encode)
            policy = LLMWrapperBase(engine, renderer=renderer)
            with LLMCollector(env, policy=policy, yield_completed_trajectories=True) as collector:
                rollouts += collector.play(1)
        env.close()
    assert [one.status for one in rollouts] == [RolloutStatus.COMPLETED] * 4, rollouts[0].error
    here = [reward_here(renderer, make_task_env("guess"), seed, GUESSES) for seed in range(4)]
    assert [one.reward for one in rollouts] == pytest.approx([reward for reward, _ in here])
    assert any(one.reward for one in rollouts)
    for rollout, (_, texts) in zip(rollouts, here, strict=True):
        shown = [message["content"] for message in rollout.messages if message["role"] == "user"]
        observed = [message["content"] for one in shown for message in json.loads(one)["observation"]["messages"]]
        assert observed == [text for text in texts if text not in GUESSES][: len(observed)] and len(observed) >= 2


def test_trls_trainer_plays_it(openenv_python, tiny_model_path, renderer):
    [source] = [block for block in re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "Served" in block]
    with served(make_task_env("addition")) as url:
        words = [openenv_python, HELPERS / "trl_trainer.py", sysconfig.get_path("purelib"), tiny_model_path, url]
        done = subprocess.run(words, input=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    played = json.loads(done.stdout.splitlines()[-1])
    assert len(played["scores"]) == 4 and sorted({seed for seed, _ in played["scores"]}) == [0, 1]
    questions = [reward_here(renderer, make_task_env("addition"), seed, ["x"])[1][1] for seed in (0, 1)]
    for number, (seed, score) in enumerate(played["scores"]):
        first, second = map(int, re.findall(r"\d+", questions[seed]))
        answer = str(first + second + number % 2)
        assert score == reward_here(renderer, make_task_env("addition"), seed, [answer])[0] == 1.0 - number % 2
        assert questions[seed] in played["prompts"][number]
    assert played["log"]["rewards/Logged/mean"] == 0.5 and played["log"]["tools/failure_frequency"] == 0.0
