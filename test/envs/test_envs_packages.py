"""Environments that installed packages announce: found by name, refused with the reason."""

from __future__ import annotations

import json
import os
import sys

import pytest
from installed_packages import Package, install
from typer.testing import CliRunner
from warm_processes import run_warm

from llmrl.cli.app import app
from llmrl.envs import make_task_env
from llmrl.envs.tasks.registry import announced_environments, find_env, is_env_name

TOWNS = """
from llmrl.envs import DatasetChatEnv
from llmrl.transforms import RubricReward

NAMES = ["Oslo", "Rome", "Lima", "Bern"]

def right(completion, answer):
    return float(completion.strip() == answer)

def towns(split="train", repeats=1, seed=0, upper=False):
    rows = [{"query": f"{split} {place} {seed}?", "answer": n.upper() if upper else n} for place, n in enumerate(NAMES)]
    return DatasetChatEnv(rows, repeats=repeats, name=split).append_transform(RubricReward(right))

class Greetings(DatasetChatEnv):
    def __init__(self, *, repeats=1, **options):
        super().__init__(["Hello"], repeats=repeats, **options)

def number():
    return 3
"""
PACKAGES = [
    Package(
        name="Acme_Envs",
        module="acme_envs",
        source=TOWNS,
        environments={"towns": "acme_envs:towns", "greetings": "acme_envs:Greetings", "number": "acme_envs:number"},
    ),
    Package(name="other-towns", module="other_towns", source="1 / 0", environments={"towns": "other_towns:towns"}),
]
runner = CliRunner()


@pytest.fixture(scope="module")
def installed_folder(tmp_path_factory, own_programs):
    return install(PACKAGES, tmp_path_factory.mktemp("packages"))


@pytest.fixture
def installed(installed_folder, monkeypatch):
    monkeypatch.syspath_prepend(installed_folder)
    return installed_folder


def test_a_packages_environment_is_made_by_its_name(installed):
    assert {"acme-envs/towns", "acme-envs/greetings", "other-towns/towns"} <= set(announced_environments())
    assert "acme_envs" not in sys.modules, "listing imports nothing"
    env = make_task_env("acme-envs/towns", "test", repeats=2, seed=7, upper=True)
    data = env.reset()
    assert data["history"].prompt.content == ["test 0 7?"] and data["answer"] == "OSLO"
    assert env.reset()["rollout", "group_id"] == data["rollout", "group_id"] == "test/0/0"
    assert make_task_env("Acme.Envs/towns").reset()["answer"] == "Oslo", "a distribution's name has many spellings"
    assert make_task_env("acme-envs/greetings", repeats=3).prompts.num_samples == 3
    assert find_env("acme-envs/towns").origin == "Acme_Envs 0.3"


def test_two_packages_may_give_one_name_to_different_environments(installed):
    assert make_task_env("acme-envs/towns") is not None
    with pytest.raises(ImportError, match=r"'other_towns:towns' of other-towns 0\.3, .* ZeroDivisionError"):
        make_task_env("other-towns/towns")


def test_what_a_package_cannot_do_is_refused(installed):
    for name, options, error, words in (
        ("towns", {}, ValueError, "Did you mean 'acme-envs/towns' or 'other-towns/towns'"),
        ("acme-envs/town", {}, ValueError, "digits, .*verifiers:TASKSET, .*acme-envs/number.*mean 'acme-envs/town"),
        ("acme-envs/number", {}, TypeError, "returned int"),
        ("acme-envs/towns", {"uper": True}, TypeError, "did you mean 'upper'"),
        ("acme-envs/towns", {"data": "rows.jsonl"}, ValueError, "takes no data"),
    ):
        with pytest.raises(error, match=words):
            make_task_env(name, **options)
    assert is_env_name("other-towns/towns") and not is_env_name("acme-envs/town")


def test_one_name_for_two_environments_is_refused_with_both(installed, tmp_path, monkeypatch):
    folder = tmp_path / "Acme_Envs-0.4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: Acme_Envs\nVersion: 0.4\n")
    (folder / "entry_points.txt").write_text("[llmrl.environments]\ntowns = mine:one\ntowns = mine:two\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"announced twice, as 'mine:one' by Acme_Envs 0\.4 and as 'mine:two' by Acme"):
        make_task_env("acme-envs/towns")


def test_commands_find_it_by_the_same_name(installed):
    result = runner.invoke(app, ["audit", "acme-envs/towns", "--limit", "4", "--json", "upper=true"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["verdict"] == "fine" and found["reference"] == "answer"
    result = runner.invoke(app, ["eval", "--env", "acme-envs/town"])
    assert result.exit_code == 2 and "acme-envs/towns" in " ".join(result.output.split())


def test_the_script_takes_it_as_a_task(installed, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-m", "llmrl.scripts.grpo", "task=acme-envs/towns", "--cfg", "job"]
    result = run_warm(command, cwd=tmp_path, env=environment)
    assert result.returncode == 0 and "name: acme-envs/towns" in result.stdout, result.stdout + result.stderr
