"""What a run gives away of its model is the weights of one step, whole, whatever goes on meanwhile."""

from __future__ import annotations

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from causal_types import causal_types
from engine_checkpoints import write_checkpoint
from fake_hub import running_hub
from loss_batches import tiny_model, with_lora
from safetensors.torch import load_file
from typer.testing import CliRunner

from llmrl._utils.files import clean_killed_writes, write_folder_atomically
from llmrl.cli.app import app
from llmrl.cli.models import model_path
from llmrl.config.model import LoRAEntries, ModelConfig
from llmrl.config.sections import (
    EnvConfig,
    ExportConfig,
    GRPOCollectConfig,
    GRPOConfig,
    GRPOTrainConfig,
    RunConfig,
)
from llmrl.runs import exports as module
from llmrl.runs.exports import Exports, exports_of
from llmrl.runs.model_files import ExportedModel
from llmrl.runs.run import Run
from llmrl.runs.run_folder import RunFolder
from llmrl.trainer import load_model


@pytest.fixture
def make_exports(tmp_path):
    """Makes a run's folder and its exports."""
    opened = []

    def make(**entries):
        lora = entries.pop("lora", None)
        cfg = GRPOConfig(
            run=RunConfig(path=str(tmp_path / "run"), trackers=[]),
            model=ModelConfig(path="maker/base-model", lora=LoRAEntries(rank=lora)),
            env=EnvConfig(name="sums", data="sums.jsonl"),
            collect=GRPOCollectConfig(groups_per_batch=2, group_size=3, max_new_tokens=64),
            train=GRPOTrainConfig(num_steps=9, learning_rate=1e-5),
            export=ExportConfig(**{"every": 1, "max_shard_size": "4KB", **entries}),
        )
        folder = RunFolder(tmp_path / "run", trackers=[])
        folder.tokenizer_path.mkdir(exist_ok=True)
        (folder.tokenizer_path / "tokenizer.json").write_text("{}")
        folder.log_metrics(1, {"reward_mean": 0.5})
        opened.append(folder)
        said = []
        return Exports(cfg, said.append), folder, said

    yield make
    for folder in opened:
        folder.close()


def weights_in(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


@pytest.mark.parametrize("kind", ["tied", "untied", "adapted"])
def test_an_export_has_the_weights_of_its_step_though_training_goes_on_while_it_is_written(
    kind, make_exports, monkeypatch
):
    model = tiny_model(is_tied=kind == "tied")
    if kind == "adapted":
        model = with_lora(model, ["q_proj", "down_proj"])
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        merged = with_lora(tiny_model(is_tied=False), ["q_proj", "down_proj"])
        merged.load_state_dict(model.state_dict())
        expected = merged.merge_and_unload().state_dict()  # peft's own
    else:
        expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    go_on, begun, write = threading.Event(), threading.Event(), module.write_model

    def slow_write(*arguments):
        begun.set()
        assert go_on.wait(240)
        write(*arguments)

    monkeypatch.setattr(module, "write_model", slow_write)
    exports, folder, _ = make_exports()
    exports.start(3, model, {}, {})
    assert begun.wait(240)  # the trainer is not held by the write
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.add_(1) if tensor.is_floating_point() else None
    assert exports_of(folder.path) == []
    go_on.set()
    exports.wait()
    (export,) = exports_of(folder.path)
    assert len(list(export.glob("*.safetensors"))) > 1 and (export / "tokenizer.json").exists()
    assert model_path(str(folder.path)) == str(export)  # of a run that has not ended
    actual = weights_in(export)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=0 if kind != "adapted" else 1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_moe", "glm4_moe", "minimax", "gpt_oss", "deepseek_v3"])
def test_files_are_those_of_transformers(model_type, tmp_path):
    """Of a model with tied weights, and of experts and buffers that checkpoints lay out otherwise than models."""
    write_checkpoint(model_type, causal_types()[model_type], tmp_path / "checkpoint")
    model = load_model(tmp_path / "checkpoint")
    model.save_pretrained(tmp_path / "expected", max_shard_size="300KB")
    (tmp_path / "actual").mkdir()
    ExportedModel(model).write(tmp_path / "actual", "300KB")

    def content(name):
        folder = tmp_path / name
        weights = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        texts = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
        index = texts.pop("model.safetensors.index.json")
        assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())
        return weights, texts, index["metadata"], index["weight_map"].keys()

    expected, actual = content("expected"), content("actual")
    assert actual[1:] == expected[1:]
    assert actual[0].keys() == expected[0].keys() == actual[3]
    for name, tensor in expected[0].items():
        torch.testing.assert_close(actual[0][name], tensor, atol=0, rtol=0, msg=name)


def test_the_last_exports_are_kept(make_exports):
    exports, folder, _ = make_exports(save_total_limit=2)
    for step in (8, 9, 10, 100):
        exports.start(step, tiny_model(), {}, {})
    exports.wait()
    assert [path.name for path in exports_of(folder.path)] == ["step-000010", "step-000100"]


def test_what_a_write_raised_is_raised_by_the_next(make_exports, monkeypatch):
    exports, folder, _ = make_exports()
    monkeypatch.setattr(module.shutil, "copytree", lambda *arguments, **options: 1 / 0)
    exports.start(1, tiny_model(), {}, {})
    with pytest.raises(ZeroDivisionError):
        exports.start(2, tiny_model(), {}, {})
    assert exports_of(folder.path) == []


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_folder_or_none(tmp_path):
    """Each write of a new folder over an old one is killed at one call of what touches files, and what is left read."""

    def write(folder):
        for place in range(3):
            (folder / f"{place}.txt").write_text("new")
        (folder / "inner").mkdir()
        (folder / "inner/3.txt").write_text("new")

    def texts(path):
        return {file.read_text() for file in path.rglob("*.txt")}

    calls = ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text"), (os, "unlink"), (os, "rmdir"))
    seen = set()
    for count in range(1, 100):
        path = tmp_path / f"{count}" / "model"
        path.mkdir(parents=True)
        for place in range(4):
            (path / f"{place}.txt").write_text("old")
        if (pid := os.fork()) == 0:
            left = count

            def counting(function):
                def call(*arguments, **options):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*arguments, **options)

                return call

            for owner, name in calls:
                setattr(owner, name, counting(getattr(owner, name)))
            try:
                write_folder_atomically(path, write)
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert texts(path) in ({"old"}, {"new"}, set()) and (not path.exists() or len(list(path.rglob("*.txt"))) == 4)
        clean_killed_writes(path.parent)
        assert list(path.parent.iterdir()) == [path] and len(list(path.rglob("*.txt"))) == 4
        (text,) = texts(path)
        seen.add(text)
        if status == 0:
            break
    assert seen == {"old", "new"} and status == 0 and count > 12


def test_exports_and_the_model_are_pushed_with_a_card(make_exports, monkeypatch):
    monkeypatch.setattr("sys.argv", ["grpo-sync.py", "task=sums", "run.path=a folder"])
    summary = {"before": {"sums": {"reward": 0.25}}, "after": {"sums": {"reward": 0.5}}}
    with running_hub(monkeypatch) as hub:
        exports, folder, said = make_exports(push_to_hub="me/mine", lora=4)
        exports.start(3, tiny_model(), {"reward_mean": 0.375}, summary)
        exports.finish(4, tiny_model(), {}, {})
        result = CliRunner().invoke(app, ["push", str(folder.path), "me/mine", "--step", "3"])
        assert result.exit_code == 0 and "/me/mine" in result.output
    (created,) = hub.created  # a run does so before anything is trained
    assert (created["organization"], created["name"], created["visibility"]) == ("me", "mine", "private")
    assert said == []
    first, last, by_hand = hub.commits
    assert (first[0], last[0]) == ("Weights after step 3", "Weights after step 4")
    for (_, files), path in zip(hub.commits, (exports_of(folder.path)[0], folder.model_path), strict=False):
        assert files == {file.name: file.read_bytes() for file in path.iterdir()}
    assert by_hand[1] == first[1]
    card = first[1]["README.md"].decode()
    for words in (
        "base_model: maker/base-model",
        "- reinforcement-learning",
        "# mine",
        "LoRA adapters of rank 4",
        "`sums`, data `sums.jsonl`",
        "2 prompts, 3 answers to each",
        "3 of 9",
        "| sums reward | 0.250 | 0.500 |",
        "| reward_mean | 0.375 |",
        "python grpo-sync.py task=sums 'run.path=a folder'",
        "learning_rate: 1.0e-05",
    ):
        assert words in card, words


def test_a_hub_that_fails_ends_no_run_that_has_begun(make_exports, tmp_path, monkeypatch):
    with running_hub(monkeypatch) as hub:
        exports, folder, said = make_exports(push_to_hub="me/mine")
        hub.refuses = "/commit/"
        exports.finish(4, tiny_model(), {}, {})
        assert len(said) == 1 and f"llmrl push {folder.path} me/mine" in said[0] and not hub.commits
        hub.refuses = "/api/"
        assert CliRunner().invoke(app, ["push", str(folder.path), "me/mine"]).exit_code == 2
        cfg = replace(exports._cfg, run=RunConfig(path=str(tmp_path / "other")))
        with pytest.raises(OSError, match="hf auth login"):
            Run(cfg)
    cfg.export.push_to_hub = "a/b/c"
    with pytest.raises(ValueError, match="a/b/c"):
        Run(cfg)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    "entries", [{"every": 0}, {"every": None, "save_total_limit": 2}, {"save_total_limit": 0}, {"max_shard_size": "5"}]
)
def test_exports_that_cannot_be_are_refused(entries):
    with pytest.raises(ValueError, match="export"):
        ExportConfig(**{"every": 1, **entries})
