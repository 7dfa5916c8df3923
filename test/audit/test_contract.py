"""The contract of environments: planted faults of each kind are found, and the project's own tasks keep it."""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import math
import random
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner
from waiting import is_running, wait_until

from llmrl.audit import check_env
from llmrl.cli.app import app
from llmrl.envs import ChatEnv, DatasetChatEnv, make_task_env, task_environments
from llmrl.rewards import Rubric
from llmrl.transforms import RubricReward
from llmrl.watch.findings import Verdict

NAMES = ("Oslo", "Rome", "Lima", "Bern")
CHECKS = ["specs", "seed", "groups", "resume", "hostile", "rewards", "timing"]
runner = CliRunner()


@pytest.fixture(scope="module")
def renderer(renderer):
    """The shared one; it encodes the megabyte of each check, which takes a second, once."""
    twin = copy.copy(renderer)
    twin.encode = functools.cache(renderer.encode)
    return twin


def rows(*notes):
    return [{"query": " ".join((f"Capital of land {i}?", *notes)), "answer": n} for i, n in enumerate(NAMES)]


def right(completion, answer):
    return float(completion.strip() == answer)


def make(reward=right, chat_env=DatasetChatEnv, repeats=2, **options):
    return chat_env(options.pop("rows", rows()), repeats=repeats, **options).append_transform(RubricReward(reward))


class UndeclaredEntry(DatasetChatEnv):
    def _step(self, tensordict):
        return super()._step(tensordict).set("seen", torch.ones(*self.batch_size, 1))


class WrongDone(DatasetChatEnv):
    def _reset(self, tensordict=None, **kwargs):
        data = super()._reset(tensordict, **kwargs)
        return data.set("terminated", torch.zeros(3, dtype=torch.int64))


class ExitingReset(DatasetChatEnv):
    def _reset(self, tensordict=None, **kwargs):
        raise SystemExit(3)


class RandomPrompts(DatasetChatEnv):
    """Each conversation has another prompt, in its group, too."""

    def _query(self, item):
        return f"{item['query']} {random.random()}"


class CountedPrompts(DatasetChatEnv):
    """Each conversation has another prompt, the same for the same seed."""

    def __init__(self, *arguments, **options):
        self.counts = itertools.count()
        super().__init__(*arguments, **options)

    def _query(self, item):
        return f"{next(self.counts)}: {item['query']}"


class SmallGroups(DatasetChatEnv):
    """Two prompts in a group of four draws."""

    def _opened(self, item, group_id, sample_index, *, query):
        return super()._opened(item, group_id, sample_index, query=f"{query} {sample_index % 2}")


class ForgottenPlace(DatasetChatEnv):
    def load_state_dict(self, state_dict, *args, **kwargs):
        pass


class RisingLevel(DatasetChatEnv):
    """Prompts by what was drawn before, which is in no state."""

    drawn = 0

    def _open_all(self, drawn):
        self.drawn += sum(one is not None and one[2] == 0 for one in drawn)
        return super()._open_all(drawn)

    def _query(self, item):
        return f"level {self.drawn // 8}: {item['query']}"


def sleeps_at_long_answers(completion, answer):
    time.sleep(3 * (len(completion) > 100_000))
    return right(completion, answer)


async def waits_at_nothing(completion, answer):
    await asyncio.sleep(60 * (not completion))
    return right(completion, answer)


def breaks_for_good(completion, answer, broken=[]):  # noqa: B006  # a state that lasts is the fault
    broken += [1] * ("7 * 7" in completion)
    return right(completion, answer) / (not broken)


def busy(completion, answer):
    end = time.process_time() + 0.06
    while time.process_time() < end:
        pass
    return right(completion, answer)


class BusyReset(DatasetChatEnv):
    def _reset(self, tensordict=None, **kwargs):
        busy("", "")
        return super()._reset(tensordict, **kwargs)


def at_random(completion):
    return random.random()


def not_a_number(completion, answer):
    return right(completion, answer) if completion else float("nan")


def infinite(completion):
    return -math.inf


@pytest.mark.slow
def test_a_sound_environment_keeps_the_contract(renderer):
    contract = check_env(make, renderer, num_groups=2)
    assert [(one.name, one.verdict) for one in contract.checks] == [(name, "fine") for name in CHECKS]


WAITING = Rubric(waits_at_nothing, timeout_seconds=0.2)
FAULTS = {
    "an entry without a spec": (lambda: make(chat_env=UndeclaredEntry), "specs", Verdict.BROKEN),
    "a done of another shape": (lambda: make(chat_env=WrongDone), "specs", Verdict.BROKEN),
    "an exit": (lambda: make(chat_env=ExitingReset), "specs", Verdict.BROKEN),
    "random rows": (lambda: make(rows=rows(str(random.random()))), "seed", Verdict.BROKEN),
    "random rewards": (lambda: make(at_random), "seed", Verdict.BROKEN),
    "counted prompts": (lambda: make(chat_env=CountedPrompts), "groups", Verdict.BROKEN),
    "two prompts in a group": (lambda: make(chat_env=SmallGroups), "groups", Verdict.BROKEN),
    "a forgotten place": (lambda: make(chat_env=ForgottenPlace), "resume", Verdict.BROKEN),
    "a state that is not saved": (lambda: make(chat_env=RisingLevel), "resume", Verdict.BROKEN),
    "a block at a long answer": (lambda: make(sleeps_at_long_answers), "hostile", Verdict.BROKEN),
    "a wait at an empty answer": (lambda: make(WAITING), "hostile", Verdict.BROKEN),
    "broken for good": (lambda: make(breaks_for_good), "hostile", Verdict.BROKEN),
    "NaN": (lambda: make(not_a_number), "rewards", Verdict.BROKEN),
    "infinity": (lambda: make(infinite), "rewards", Verdict.BROKEN),
    "busy rewards": (lambda: make(busy), "timing", Verdict.LOOK),
    "busy resets": (lambda: make(chat_env=BusyReset), "timing", Verdict.LOOK),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(renderer, fault, monkeypatch):
    monkeypatch.setattr("llmrl.audit.contract.SLOW_S", 0.05)
    make, name, verdict = FAULTS[fault]
    num_groups = 2 if name in ("groups", "resume") else 1
    contract = check_env(make, renderer, num_groups=num_groups, timeout_s=1.5 if "block" in fault else 60.0)
    found = {one.name: one for one in contract.checks}
    assert found[name].verdict is verdict, contract.to_json()


TASKS = {
    "code": None,
    "guess": None,
    "search": None,
    "gsm8k": [{"question": "Two eggs and two?", "answer": "2 + 2 #### 4"}],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_tasks_of_this_project_keep_the_contract(renderer, name):
    data = {} if TASKS[name] is None else {"data": TASKS[name]}
    contract = check_env(lambda: make_task_env(name, repeats=2, **data), renderer, num_groups=1)
    assert contract.verdict is Verdict.FINE, contract.to_json()


def test_what_cannot_be_checked_is_refused(renderer):
    with pytest.raises(ValueError, match="has no dataset"):
        check_env(ChatEnv, renderer)


OWN = """
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from llmrl.envs import DatasetChatEnv
from llmrl.transforms import RubricReward

def ends(completion):
    print("printed by a reward")
    os._exit(7) if completion == "" else None
    return 0.0

def sound(completion, answer):
    print("printed by a reward")
    return float(completion == answer)

pool = ProcessPoolExecutor(1)

def pooled(completion, answer):
    Path(__file__).with_name("pid").write_text(str(pool.submit(os.getpid).result()))
    return float(completion == answer)

def make(split="train", repeats=1, reward="sound", tail="?"):
    '''Make it.

    Args:
        tail: end of
            every question.
    '''
    rows = [{"query": f"Capital of {split} {i}{tail}", "answer": n} for i, n in enumerate(("Oslo", "Rome", "Lima"))]
    env = DatasetChatEnv(rows[: 1 if split == "test" else 3], repeats=repeats, system_prompt="Name a town.")
    return env.append_transform(RubricReward(globals()[reward]))
"""


def test_the_command_prints_a_verdict_also_if_the_process_ends(tmp_path, own_programs):
    (tmp_path / "own.py").write_text(OWN)
    words = ["env", "check", f"{tmp_path}/own.py:make", "--limit", "1", "--json", "reward=ends"]
    result = runner.invoke(app, words)
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["verdict"] == "broken"
    assert "exit code 7 during an unknown tool" in found["checks"][0]["says"]


@pytest.mark.slow
def test_a_reward_in_processes_of_its_own_keeps_the_contract_and_they_end(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = ["env", "check", f"{tmp_path}/own.py:make", "--limit", "1", "--json", "reward=pooled"]
    # An interpreter of its own: processes of tests are forked by one of another group.
    result = subprocess.run([sys.executable, "-m", "llmrl", *words], capture_output=True, text=True)
    assert result.returncode == 0 and json.loads(result.stdout)["verdict"] == "fine", result.stderr
    wait_until(lambda: not is_running(int((tmp_path / "pid").read_text())))


def test_the_facts_about_an_environment(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    result = runner.invoke(app, ["env", "info", f"{tmp_path}/own.py:make", "tail=.", "--json"])
    found = json.loads(result.stdout)
    assert found["columns"] == ["query", "answer"] and found["num_rows"] == {"train": 3, "test": 1}
    assert found["rewards"] == {"sound": 1.0} and found["max_turns"] is None and found["tools"] == []
    assert {"name": "tail", "default": "'?'", "about": "end of every question."} in found["options"]
    system, user = "system\nName a town.<|im_end|>", "user\nCapital of train 0.<|im_end|>"
    assert found["prompt"] == f"<|im_start|>{system}\n<|im_start|>{user}\n<|im_start|>assistant\n"
    result = runner.invoke(app, ["env", "info", "search", "max_steps=3"])
    text = " ".join(result.output.split())
    assert all(word in text for word in ("tools search", "max turns 3", "rewards answer 1.0, searched 0.2", "<tools>"))


def test_the_environments_are_listed_with_where_they_come_from():
    listed = json.loads(runner.invoke(app, ["env", "list", "--json"]).stdout)["environments"]
    origins = {one["name"]: one["origin"] for one in listed}
    assert origins["gsm8k"] == "llmrl" and origins["verifiers:…"] == "verifiers"
    text = " ".join(runner.invoke(app, ["env", "list"]).output.split())
    assert all(name in text for name in task_environments())
