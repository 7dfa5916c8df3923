"""The wheel in an environment without a checkout: what a person does first there, as the README has it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import llmrl
from llmrl.cli.new import KINDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE_URL = "https://example.org/llmrl"
TRAINING = """
import sys
from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, train

def length(completion):
    return float(len(completion) % 7) / 7

env = DatasetChatEnv(["1 + 1 =", "2 + 1 ="], repeats=4).append_transform(RubricReward(length))
engine = TransformersEngine(sys.argv[1])
train(sys.argv[1], env, engine=engine, path="runs/mine", num_steps=1, groups_per_batch=2, max_new_tokens=4)
engine.shutdown()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run a program of an environment that has the wheel, and the packages that the tests run with."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    source = folder / "source"  # a copy: setuptools writes beside what it builds
    for part in ("llmrl", "examples", "sota-implementations"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=ignored)
    for part in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source]
    subprocess.run(build, check=True, env={**os.environ, "SOURCE_URL": SOURCE_URL})
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv/bin/python"
    subprocess.run([*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel], check=True)
    (site,) = (folder / "venv/lib").glob("python*/site-packages")
    (site / "tests.pth").write_text(sysconfig.get_path("purelib"))  # its own .pth files, of a checkout, are not read
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    work = folder / "work"
    work.mkdir()

    def run(program, *words, cwd=work):
        command = [folder / "venv/bin" / program, *words]
        result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    run.work = work
    return run


def test_the_wheel_has_the_scripts_configurations(installed, own_programs):
    where = installed("python", "-c", "import llmrl; print(llmrl.__file__)")
    assert str(ROOT) not in where and "site-packages" in where
    text = installed("llmrl", "train", "--help")
    assert "num_digits: 1" in text and "hardware: cpu, cpu-2ranks, cpu-4ranks, gpu1" in text


def test_the_wheel_has_the_recipes_with_their_bands(installed, own_programs):
    listed = json.loads(installed("llmrl", "recipe", "list", "--json"))["recipes"]
    [sums] = [one for one in listed if one["name"] == "one-digit-sums"]
    assert sums["after"] > 0.9
    code = "import llmrl.scripts.sft, llmrl.recipes as r; print(r.find_recipe('alphabet-sort').data_hash())"
    assert len(installed("python", "-c", code).split()[0]) == 64


def test_links_of_the_description_lead_to_files_of_this_version(installed, own_programs):
    text = installed("python", "-c", "from importlib import metadata; print(metadata.metadata('llmrl').get_payload())")
    targets = re.findall(r"\]\(([^)]*)\)", text)
    begins = {mark: f"{SOURCE_URL}/{mark}/v{llmrl.__version__}/" for mark in ("blob", "raw")}
    assert len(targets) > 20 and f"]({begins['raw']}docs/token-view.png)" in text
    for target in targets:
        place = target.removeprefix(begins["blob"]).removeprefix(begins["raw"])
        assert place != target and (ROOT / place.partition("#")[0]).exists(), target


def test_train_runs_from_the_wheel_and_its_run_is_looked_at(installed, tiny_model_path, own_programs):
    text = installed("python", "-c", TRAINING, tiny_model_path)
    assert "all 1 steps are done" in text and "llmrl view runs/mine" in text
    assert (installed.work / "runs/mine/model/config.json").exists()
    assert "view.html" in installed("llmrl", "view", "runs/mine")


def test_what_new_writes_passes_its_tests_and_knows_the_scripts_entries(installed, own_programs):
    for kind in KINDS:
        assert installed("llmrl", "new", kind, f"my_{kind}").startswith(f"my_{kind}/my_{kind}.py")
        folder = installed.work / f"my_{kind}"
        code = [line for line in (folder / f"my_{kind}.py").read_text().splitlines() if line.strip()]
        assert kind == "loop" or len(code) < 40
        assert (folder / "README.md").read_text().startswith(f"# my_{kind}\n")
    text = installed("llmrl", "train", "my_task.py:env", "--cfg", "job", cwd=installed.work / "my_task")
    assert "name: my_task.py:env" in text and "target_reward: 0.95" in text
    assert " passed" in installed("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", ".")
