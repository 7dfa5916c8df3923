"""A resumed run goes on with its own configuration and what the command line changes of it."""

from __future__ import annotations

from itertools import product

import pytest
import yaml
from omegaconf import OmegaConf
from script_configs import FOLDER, composed

from llmrl.config.launch import prepared, typed
from llmrl.config.resumed import load_config, resumed_config, save_config
from llmrl.config.sections import GRPOConfig
from llmrl.data.state_file import DamagedFileError
from llmrl.replay.recorded import RecordedRun
from llmrl.runs.run_card import run_card
from llmrl.runs.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("takes_long")  # hydra composes configurations


@pytest.fixture
def run_path(tmp_path):
    """Of a run that was begun with choices of its own."""
    own = ("task=gsm8k", "hardware=gpu1", "model.path=mine", "train.learning_rate=3.0e-6", "collect.group_size=4")
    save_config(typed(composed("grpo-async", f"run.path={tmp_path}", *own), GRPOConfig), tmp_path)
    return tmp_path


def resumed(run_path, *overrides, algorithm="grpo-async"):
    overrides = (f"run.path={run_path}", "resume=true", *overrides)
    return resumed_config(composed(algorithm, *overrides), overrides=overrides, config_folders=[FOLDER])


def test_the_readmes_own_command_goes_on_with_what_the_run_was_begun_with(run_path):
    cfg, changes = resumed(run_path)
    assert changes == {}
    assert (cfg.env.name, cfg.model.path, cfg.train.learning_rate) == ("gsm8k", "mine", 3.0e-6)
    assert (cfg.train.device, cfg.collect.group_size, cfg.collect.max_staleness) == ("cuda", 4, 1)
    assert cfg.resume is True


@pytest.mark.parametrize("value", ["1.0e-5", "2.0e-5", "1e-6"])  # the second is the demo's
def test_a_learning_rate_that_is_asked_for_is_obeyed_and_shown(run_path, value):
    cfg, changes = resumed(run_path, f"train.learning_rate={value}", "train.num_steps=70")
    assert cfg.train.learning_rate == float(value) and cfg.train.num_steps == 70
    saved = OmegaConf.load(run_path / "config.yaml")
    assert changes == {
        "train.learning_rate": (3.0e-6, float(value)),
        "train.num_steps": (saved.train.num_steps, 70),
    }


def test_a_hardware_that_builds_on_another_is_taken_with_it(run_path):
    cfg, changes = resumed(run_path, "hardware=cpu-2ranks")
    assert cfg.train.num_ranks == 2
    assert cfg.train.token_budget == OmegaConf.load(FOLDER / "hardware/cpu.yaml").train.token_budget
    assert changes["train.num_ranks"] == (1, 2) and "defaults" not in cfg


def test_another_hardware_is_taken_as_a_whole_and_leaves_the_rest(run_path):
    cfg, changes = resumed(run_path, "hardware=cpu", "model.dtype=bfloat16")
    expected = OmegaConf.load(FOLDER / "hardware/cpu.yaml")
    assert (cfg.train.device, cfg.sync.transport, cfg.model.dtype) == ("cpu", expected.sync.transport, "bfloat16")
    assert cfg.train.learning_rate == 3.0e-6 and cfg.env.name == "gsm8k"
    assert changes["train.device"] == ("cuda", "cpu")
    # Only what that file gives, or the command line.
    given = OmegaConf.to_container(expected)
    assert {tuple(name.split(".")[:2]) for name in changes} <= {(room, name) for room in given for name in given[room]}


def test_a_hardware_in_another_folder_builds_on_those_of_the_scripts(run_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "hardware").mkdir()
    (folder / "hardware/mine.yaml").write_text("defaults: [cpu-2ranks, _self_]\ntrain: {cpu_threads: 3}\n")
    overrides = (f"run.path={run_path}", "resume=true")
    cfg = composed("grpo-async", *overrides)
    asked, _ = resumed_config(cfg, overrides=(*overrides, "hardware=mine"), config_folders=[FOLDER, folder])
    assert (asked.train.num_ranks, asked.train.cpu_threads, asked.train.device) == (2, 3, "cpu")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task=addition", r"env\.name='gsm8k' and cannot continue with 'addition'"),
        ("model.path=other", r"model\.path='mine'"),
        ("collect.group_size=8", r"collect\.group_size=4"),
        ("seed=3", "seed=0"),
        ("env.data=other.jsonl", r"env\.data"),
        ("~env.options.num_digits", "set the entry"),
        ("model.lora.rank=8", r"model\.lora\.rank=None"),
        ("train.moments=8bit", r"train\.moments='float32' and cannot continue with '8bit'"),
    ],
)
def test_another_run_is_refused(run_path, override, message):
    before = (run_path / "config.yaml").read_text()
    with pytest.raises(ValueError, match=message):
        resumed(run_path, override)
    assert (run_path / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("saved", "asked"), [({}, {"a": 2}), ({"a": 2}, {}), ({"a": 1}, {"a": 2}), ({"b": 1}, {"a": 2})]
)
def test_other_options_of_the_environment_are_another_run(tmp_path, saved, asked):
    cfg = typed(composed("grpo-async", "task=addition", f"run.path={tmp_path}"), GRPOConfig)
    cfg.env.options = saved
    save_config(cfg, tmp_path)
    assert resumed_config(cfg)[1] == {}
    cfg.env.options = asked
    with pytest.raises(ValueError, match=r"env\.options\.[ab]=\w+ and cannot continue with"):
        resumed_config(cfg)
    if asked:
        with pytest.raises(ValueError, match=r"env\.options\.a=\w+ and cannot continue with 2"):
            resumed(tmp_path, "++env.options.a=2")


def test_another_algorithm_is_refused(run_path):
    with pytest.raises(ValueError, match="algorithm='grpo' and cannot continue with 'expert-iteration'"):
        resumed(run_path, "algorithm=expert-iteration", algorithm="expert-iteration")


def test_the_task_of_the_run_may_be_named_again(run_path):
    assert resumed(run_path, "task=gsm8k")[1] == {}


def test_a_task_that_has_its_environment_from_another_task_may_be_named_again(tmp_path):
    task = "task=reasoned-addition"
    save_config(typed(composed("grpo-async", task, f"run.path={tmp_path}"), GRPOConfig), tmp_path)
    cfg, changes = resumed(tmp_path, task, "train.num_steps=70")
    assert cfg.env.name == "addition" and cfg.env.options.reasoning and list(changes) == ["train.num_steps"]
    with pytest.raises(ValueError, match=r"env\.name='addition' and cannot continue with 'gsm8k'"):
        resumed(tmp_path, "task=gsm8k")


def test_an_entry_that_came_with_a_newer_version_has_its_default(run_path):
    saved = OmegaConf.load(run_path / "config.yaml")
    del saved.train["weight_decay"]
    OmegaConf.save(saved, run_path / "config.yaml")
    cfg, changes = resumed(run_path)
    assert cfg.train.weight_decay == 0.0 and changes == {"train.weight_decay": (None, 0.0)}


@pytest.mark.parametrize("text", ["{{ '${' }}${{ x }}", "${x}", r"\${x} \\${oc.env:HOME}", "a\\", "${run.path}"])
def test_a_text_with_a_dollar_and_a_brace_is_no_reference(tmp_path, text):
    cfg = typed(composed("grpo-async", "task=addition", f"run.path={tmp_path}"), GRPOConfig)
    cfg.model.chat_template, cfg.env.options = text, {"prompts": [text]}
    save_config(cfg, tmp_path)
    assert yaml.safe_load(run_card(cfg, 1, {}, {}).split("```yaml\n")[1].split("```")[0])["env"]["name"] == "addition"
    asked, changes = resumed(tmp_path, "train.num_steps=70")
    assert list(changes) == ["train.num_steps"]
    for again in (typed(asked, GRPOConfig), typed(resumed_config(cfg)[0], GRPOConfig)):
        assert again.model.chat_template == text and again.env.options == {"prompts": [text]}
    folder = RunFolder(tmp_path, trackers=())
    folder.log_metrics(1, {"policy_version": 1.0})
    folder.close()
    assert RecordedRun(tmp_path).config(["loss=dapo"]).model.chat_template == text


def test_a_saved_text_is_read_as_it_was(tmp_path):
    texts = ["".join(signs) for length in range(6) for signs in product("\\${}a", repeat=length)]
    cfg = typed(composed("grpo-async", "task=addition"), GRPOConfig)
    cfg.env.options = {"prompts": texts}
    save_config(cfg, tmp_path)
    assert load_config(tmp_path)["env"]["options"] == {"prompts": texts}


@pytest.mark.parametrize("text", ["a: !!timestamp x", "a: !!bool x", "a: &a [*a]"])
def test_a_saved_configuration_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(DamagedFileError, match=r"(?s)config\.yaml is damaged: .*Put a copy of it in its place\."):
        load_config(tmp_path)


def test_a_path_beside_a_file_of_its_name_is_an_entry_of_a_resumed_run(run_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("problems") / "mine"
    path.with_suffix(".yaml").write_text("train: {num_steps: 3}\n")
    cfg, changes = resumed(run_path, f"env.eval_split={path}")
    assert cfg.env.eval_split == str(path) and list(changes) == ["env.eval_split"]


def test_a_folder_that_was_moved_is_where_it_is_now(run_path, tmp_path_factory):
    moved = tmp_path_factory.mktemp("moved") / "run"
    run_path.rename(moved)
    cfg, changes = resumed(moved)
    assert cfg.run.path == str(moved) and changes == {}


def test_a_dry_run_of_a_run_that_is_resumed_has_the_configuration_of_that_run(run_path, monkeypatch, capsys):
    overrides = [f"run.path={run_path}", "resume=true", "dry_run=true", "train.num_steps=70"]
    monkeypatch.setattr("llmrl.config.resumed._command_line", lambda: (overrides, [FOLDER]))
    cfg = prepared(composed("grpo-async", *overrides), GRPOConfig)
    assert (cfg.env.name, cfg.collect.group_size, cfg.train.learning_rate) == ("gsm8k", 4, 3.0e-6)
    assert not cfg.resume and cfg.run.path != str(run_path)
    planned = capsys.readouterr().out
    assert "steps    70" in planned and "trainer  cuda" in planned


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        resumed(tmp_path)


def test_without_a_command_line_every_entry_is_asked_for(run_path):
    own = ("task=gsm8k", "model.path=mine", "collect.group_size=4", f"run.path={run_path}", "resume=true")
    cfg = typed(composed("grpo-async", *own), GRPOConfig)
    asked, changes = resumed_config(cfg)
    assert asked.train.device == "cpu" and asked.train.learning_rate == cfg.train.learning_rate
    assert changes["train.device"] == ("cuda", "cpu") and typed(asked, GRPOConfig) == cfg
