"""A resource server of NeMo-Gym, the real package, is played through verifiers' own taskset."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from endpoint_agents import LoggingEngine, trained_spans
from rendering_families import family_renderer

from llmrl.collectors import LLMCollector
from llmrl.data import RolloutStatus
from llmrl.envs import VerifiersEnv
from llmrl.envs.hubs import virtual_env
from llmrl.envs.hubs.virtual_env import InstallError
from llmrl.policies import LLMWrapperBase

HELPERS = Path(__file__).parents[1] / "helpers"
NEMO = ("nemo-gym>=0.4", "uvicorn", "omegaconf")
COUNTER = "resources_servers.example_session_state_mgmt.app:StatefulCounterResourcesServer"
WEATHER = "resources_servers.example_mcp_weather.app:ExampleMCPWeatherResourcesServer"


@pytest.fixture(scope="module")
def nemo_python(own_programs):
    """A Python with nemo-gym, which wants 3.12 at least."""
    newer = sys.executable
    if sys.version_info < (3, 12):
        newer = next((path for name in ("python3.13", "python3.12") if (path := working(name))), None)
    if newer is None:
        pytest.skip("nemo-gym needs Python 3.12")
    folder = virtual_env.cache_folder() / "nemo-gym"
    if not (folder / "installed").exists():
        uv = Path(sys.prefix) / "bin" / "uv"
        python = folder / "bin" / "python"
        for words in (["venv", "--clear", "--python", newer, folder], ["pip", "install", "--python", python, *NEMO]):
            done = subprocess.run([uv, *words], capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"nemo-gym cannot be installed here: {done.stderr[-500:]}")
        (folder / "installed").touch()
    return folder / "bin" / "python"


def working(name):
    """The path of a program, if it can be started."""
    path = shutil.which(name)
    done = path and subprocess.run([path, "-c", "import sys; print(sys.executable)"], capture_output=True, text=True)
    return done.stdout.strip() if done and done.returncode == 0 else None


@contextlib.contextmanager
def resources(python, server):
    with subprocess.Popen(
        [python, HELPERS / "nemo_gym_server.py", server], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield next(line.strip() for line in process.stdout if line.startswith("http"))
        finally:
            process.kill()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def count(prompt):
    """What the counter asks for: `add 4 then add 5 then get the count`."""
    asked = [int(number) for number in re.findall(r"add (\d+)", prompt.rpartition("<|im_start|>user\nadd")[1] + prompt)]
    done = prompt.count("<tool_response>")
    if done < len(asked):
        return call("increment_counter", count=asked[done])
    return call("get_counter_value") if done == len(asked) else f"It is {prompt.split('<tool_response>')[-1][:20]}."


def play(model_path, url, dataset, answer, num_rollouts):
    renderer = family_renderer(str(model_path), "qwen25")
    engine = LoggingEngine(
        lambda prompt_ids: f"{answer(renderer.decode(prompt_ids))}<|im_end|>",
        encode=renderer.encode,
        decode=renderer.decode,
        max_model_len=4096,
    )
    config = {"taskset": {"dataset": str(dataset), "task": {"resources_url": url}}}
    try:
        env = VerifiersEnv("nemo_gym", config=config, repeats=2)
    except InstallError as error:
        pytest.skip(f"verifiers cannot be installed here: {error}")
    policy = LLMWrapperBase(engine, renderer=renderer, generate_kwargs={"max_new_tokens": 256})
    with LLMCollector(env, policy=policy, groups_per_batch=1, max_concurrent_rollouts=4) as collector:
        rollouts = collector.play(num_rollouts)
    env.close()
    return rollouts, engine


def data_of(python, server):
    [folder] = Path(python).parents[1].glob(f"lib/python*/site-packages/resources_servers/{server.split('.')[1]}")
    return folder / "data" / "example.jsonl"


def test_a_counter_with_a_session_each_is_played_and_paid(nemo_python, model_path):
    with resources(nemo_python, COUNTER) as url:
        rollouts, engine = play(model_path, url, data_of(nemo_python, COUNTER), count, 6)
        assert [one.status for one in rollouts] == [RolloutStatus.COMPLETED] * 6, rollouts[0].error
        assert [one.reward for one in rollouts] == [1.0] * 6  # eight at once would count each other's numbers
        assert {one.num_turns for one in rollouts} == {4}
        trained = sum((trained_spans(one.conversation.reconcile()) for one in rollouts), Counter())
        assert trained == Counter(engine.log) and len(engine.log) == 24
        wrong, _ = play(model_path, url, data_of(nemo_python, COUNTER), lambda prompt: "I cannot count.", 2)
    assert [one.reward for one in wrong] == [0.0, 0.0]


def test_tools_by_mcp_are_called(nemo_python, model_path):
    def answer(prompt):
        said = re.search(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
        return said[1] if said else call("get_weather", city=re.findall(r"MCP tool for (\w+)", prompt)[-1])

    with resources(nemo_python, WEATHER) as url:
        rollouts, _ = play(model_path, url, data_of(nemo_python, WEATHER), answer, 4)
    assert [(one.status, one.reward) for one in rollouts] == [(RolloutStatus.COMPLETED, 1.0)] * 4, rollouts[0].error


def test_a_server_that_is_gone_ends_rollouts_with_the_reason(nemo_python, model_path):
    with resources(nemo_python, COUNTER) as url:
        dataset = data_of(nemo_python, COUNTER)
    rollouts, _ = play(model_path, url, dataset, count, 2)
    assert [one.status for one in rollouts] == [RolloutStatus.ERROR] * 2 and "onnect" in rollouts[0].error
