"""`llmrl train` and `llmrl demo`: from the words that a person types to the script's configuration."""

from __future__ import annotations

import json
import math
import sys

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from script_configs import config
from typer.testing import CliRunner
from warm_processes import run_warm

from llmrl._utils.json_values import as_entry_value
from llmrl.cli import train as command
from llmrl.cli.app import app

runner = CliRunner()


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Type a command; the entries that the script is started with, or the message."""
    monkeypatch.chdir(tmp_path)

    def type_in(*words):
        entries = []
        monkeypatch.setattr(command, "run_script", entries.extend)
        result = runner.invoke(app, words)
        return entries if result.exit_code == 0 else " ".join(result.output.split())

    return type_in


def test_an_environment_of_ones_own_is_trained_with_the_entries_beside_it(started, tmp_path):
    (tmp_path / "sums.py").write_text("def env(split, repeats): ...")
    assert started("train", "sums.py:env", "seed=1") == ["task=own", "env.name='sums.py:env'", "seed=1"]
    (tmp_path / "sums.yaml").write_text(
        'collect:\n  group_size: 4\n  max_staleness: null\nenv:\n  options: {prompt: "it\'s 1: a, b", sizes: [1, 2]}\n'
    )
    assert started("train", "sums.py:env", "seed=1") == [
        "task=own",
        "env.name='sums.py:env'",
        "++collect.group_size=4",
        "++collect.max_staleness=null",
        "++env.options={prompt:'it\\'s 1: a, b',sizes:[1,2]}",
        "seed=1",
    ]


@pytest.mark.parametrize("folder", ["übung", "a(1)", "a[1]", "a{b}", "a#b", "it's", "lr=1", "a,b", "a b"])
def test_an_environment_in_a_folder_of_any_name_is_the_one_that_is_trained(started, tmp_path, folder):
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "sums.py").write_text("def env(split, repeats): ...")
    task, name = OverridesParser.create().parse_overrides(started("train", f"{folder}/sums.py:env"))
    assert (task.value(), name.key_or_group) == ("own", "env.name")
    assert not name.is_sweep_override() and name.value() == f"{folder}/sums.py:env"


def test_a_task_a_resumed_run_and_the_demo_are_the_scripts_entries(started):
    assert started("train", "task=gsm8k", "hardware=gpu1") == ["task=gsm8k", "hardware=gpu1"]
    assert started("train", "env.name=sums.py:env") == ["env.name=sums.py:env"]
    assert started("train", "--help") == ["--help"] and started("demo", "seed=1") == ["seed=1"]


def test_a_file_or_function_that_is_missing_is_answered_before_anything_starts(started, tmp_path):
    (tmp_path / "sums.py").write_text("")
    assert "there is no file 'no.py'" in started("train", "no.py:env")
    assert "FILE.py:FUNCTION" in started("train", "sums.py")
    (tmp_path / "sums.yaml").write_text("- 1")
    assert "sums.yaml must contain sections" in started("train", "sums.py:env")


@pytest.mark.parametrize(("text", "message"), [("a: [1", "sums.yaml must be valid YAML"), ("a: 1\na: 2", "duplicate")])
def test_a_file_beside_an_environment_that_cannot_be_read_is_named(started, tmp_path, text, message):
    (tmp_path / "sums.py").write_text("")
    (tmp_path / "sums.yaml").write_text(text)
    assert message in started("train", "sums.py:env")


def test_values_beside_an_environment_are_those_that_a_configuration_has(started, tmp_path):
    """The script reads the entries of the command line, and the same text as a file of its own configuration."""
    text = (
        "train:\n  learning_rate: 1e-3\nenv:\n  options: {since: 2024-05-01, parts: [{a: 1, b c: [x, {d=e: 1.5}]}]}\n"
    )
    (tmp_path / "sums.py").write_text("")
    (tmp_path / "sums.yaml").write_text(text)
    overrides = OverridesParser.create().parse_overrides(started("train", "sums.py:env")[2:])
    given = {one.key_or_group: one.value() for one in overrides}
    expected = OmegaConf.to_container(OmegaConf.create(text))
    assert given == {"train.learning_rate": 0.001, "env.options": expected["env"]["options"]}


def test_entries_beside_an_environment_are_composed_whatever_they_hold(started, tmp_path, takes_long):
    text = """
        env: {options: {my column: a, a.b: 1, sizes: {small: 1, 2: [x]}}}
        eval: {envs: {held: {name: gsm8k, options: {reasoning: true}}}}
        model: {lora: {rank: 3}}
        loss: dapo
    """
    (tmp_path / "sums.py").write_text("")
    (tmp_path / "sums.yaml").write_text(text)
    cfg = config("grpo", *started("train", "sums.py:env", "env.options.sizes.small=2"))
    assert cfg.env.options == {"my column": "a", "a.b": 1, "sizes": {"small": 2, 2: ["x"]}}
    assert (cfg.eval.envs["held"].name, cfg.eval.envs["held"].options) == ("gsm8k", {"reasoning": True})
    assert (cfg.model.lora.rank, cfg.loss) == (3, "dapo")


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-7, 0.1, -0.0, 10**30, True, None])
def test_hydra_reads_a_value_as_it_was_written(value):
    (override,) = OverridesParser.create().parse_overrides([f"++env.options.a={as_entry_value([value])}"])
    assert repr(override.value()) == repr([value])


@pytest.mark.parametrize("name", ["1", "null", "1e3", "true", "it's", "a;b", "größe", ""])
@pytest.mark.parametrize("form", ["data: [{%s: a}]", "options: {parts: [{a: [{%s: 1}]}]}"])
def test_a_name_that_hydra_reads_otherwise_is_refused(started, tmp_path, name, form):
    (tmp_path / "sums.py").write_text("")
    (tmp_path / "sums.yaml").write_text(f"env: {{{form % json.dumps(name)}}}")
    assert "has a name that hydra cannot read on a command line" in started("train", "sums.py:env")


@pytest.mark.parametrize(("text", "name"), [("env: {my data: 1}", "env.my data"), ("größe: 1", "größe"), ("3: 4", "3")])
def test_an_entry_that_hydra_cannot_read_is_refused_with_its_name(started, tmp_path, text, name):
    (tmp_path / "sums.py").write_text("")
    (tmp_path / "sums.yaml").write_text(text, encoding="utf-8")
    assert f"sums.yaml: {name} has a name that hydra cannot read" in started("train", "sums.py:env")


SCRIPT = """
import sys
from llmrl.runs.run_folder import RunFolder

print("step 1", sys.argv[1:])
path = next(word for word in sys.argv if word.startswith("run.path=")).removeprefix("run.path=")
folder = RunFolder(path)
folder.log_metrics(1, {"reward_mean": 0.25})
folder.write_summary({"after": {"sums": {"reward": 0.5}}})
folder.close()
"""


def test_json_is_one_object_and_the_rest_goes_to_stderr(tmp_path, own_programs):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "sums.py").write_text("def env(split, repeats): ...")
    program = "import llmrl.cli.run_report as r; r.MODULE = 'script'; from llmrl.cli.app import app; app()"

    def run(*words):
        result = run_warm([sys.executable, "-c", program, *words], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    report, others = run("train", "sums.py:env", "--json", "run.path=runs/mine")
    assert report == {
        "run": "runs/mine", "model": None, "is_running": False, "metrics": [{"step": 1, "reward_mean": 0.25}],
        "health": [], "after": {"sums": {"reward": 0.5}},
    }  # fmt: skip
    assert """step 1 ['task=own', "env.name='sums.py:env'", 'run.path=runs/mine']""" in others
    assert run("view", "runs/mine", "--json")[0] == {"runs": [report]}
    assert not (tmp_path / "runs/mine/view.html").exists()
    (other, _) = run("train", "--json", "task=gsm8k")
    assert other["run"].startswith("runs/train-") and (tmp_path / other["run"]).is_dir()


@pytest.mark.parametrize("text", ["a", "it's", "C:\\temp\\", "a, b=c [d] {e}", "$x", "1", "true", "", " ä "])
def test_hydra_reads_a_text_as_it_was_written(text):
    (override,) = OverridesParser.create().parse_overrides([f"++env.options.prompt={as_entry_value(text)}"])
    assert override.value() == text


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e-5, 1e30])
def test_hydra_reads_a_number_beside_an_environment_as_a_number(tmp_path, number):
    (tmp_path / "sums.py").touch()
    (tmp_path / "sums.yaml").write_text(yaml.safe_dump({"env": {"options": {"limits": [number]}}}))
    *_, entry = command.entries_of([f"{tmp_path}/sums.py:env"])
    (override,) = OverridesParser.create().parse_overrides([entry])
    assert override.key_or_group == "env.options" and override.value() == {"limits": [number]}
