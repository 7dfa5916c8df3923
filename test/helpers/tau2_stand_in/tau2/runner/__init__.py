"""The names of tau2 1.0.1 that `tau2_worker.py` uses, with tasks that go wrong; the conversation is a greeting."""

import json
import os
import signal
import sys
import time
import urllib.request
from enum import Enum
from pathlib import Path
from types import SimpleNamespace


class Part(Enum):
    """What a reward is made of."""

    DB = "DB"


def get_tasks(domain, split, task_ids):
    path = Path(os.environ["TAU2_DATA_DIR"]) / "tau2" / "domains" / domain / "tasks.json"
    names = [name for name in json.loads(path.read_text()) if task_ids is None or name in task_ids]
    return [SimpleNamespace(id=name, user_scenario=f"You are {name}.") for name in names]


def build_text_orchestrator(config, task):
    return SimpleNamespace(config=config, task=task)


def ask(model, arguments, text):
    body = json.dumps({"model": model.removeprefix("openai/"), "messages": [{"role": "user", "content": text}]})
    headers = {"authorization": f"Bearer {arguments['api_key']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{arguments['api_base']}/chat/completions", body.encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def run_simulation(orchestrator):
    config, name = orchestrator.config, orchestrator.task.id
    said = ask(config.llm_agent, config.llm_args_agent, f"I am {name}.")
    if name == "dies":
        print("these were its last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "hangs":
        time.sleep(60)
    if name == "raises":
        raise KeyError("no such order")
    if name == "prints":
        for _ in range(64):
            os.write(1, b"x" * (1 << 20))
    reward = float("nan") if name == "nan" else float("hello" in said)
    judged = SimpleNamespace(reward=reward, reward_breakdown={Part.DB: 1.0}, info=None)
    reason = "user_error" if name == "user" else "user_stop"
    return SimpleNamespace(reward_info=judged, termination_reason=SimpleNamespace(value=reason), messages=[said])
