"""Runs of other persons: damaged, hostile, or of another machine. Nothing in a folder is executed."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import pathlib
import pickle
import re
import zipfile

import numpy as np
import pytest
from pytest import approx
from recorded_runs import NUM_STEPS, call, edit_jsonl
from typer.testing import CliRunner

from llmrl.cli.app import app
from llmrl.config import resumed


@pytest.mark.parametrize(
    ("damage", "exit_code"),
    [
        ({"step": []}, 0),
        ({"turns": [{"parent": 3, "messages": []}]}, 0),
        ({"messages": [{"content": "no role"}]}, 0),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}, 0),
        ({"reward": 10**400}, 0),
        ({"reward_breakdown": {"length": "high"}}, 0),
        ({"status": "praised"}, 2),
    ],
)
def test_records_that_no_run_writes_are_left_out_or_refused(run_path, rewards, tmp_path, damage, exit_code):
    """A folder may come from another person: every command ends with a result or a message."""
    path = run_path / "rollouts.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    edit_jsonl(path, lambda one: {**one, **damage} if one["rollout_id"] == last["rollout_id"] else one)
    scored = call("rescore", run_path, "--reward", f"{rewards}:length", "--json")
    assert scored.exit_code == exit_code
    if not exit_code:
        assert json.loads(scored.output)["num_rollouts"] == 4 * NUM_STEPS * 2 - 1
    else:
        assert last["rollout_id"] in scored.output and "praised" in scored.output
    called = call("conversations", run_path, tmp_path / "said.jsonl", "--as", "sft")
    assert called.exit_code == 0


def test_a_step_without_its_batch_says_what_would_have_kept_it(run_path):
    (run_path / "batches" / "000001.safetensors").unlink()
    called = call("replay", run_path, "--step", 2)
    assert called.exit_code == 2 and "run.keep_batches=true" in called.output
    assert call("replay", run_path, "--step", 2, "--quantities", "advantages").exit_code == 0
    called = call("replay", run_path, "--step", 9)
    assert called.exit_code == 2 and "1 to 4" in called.output


def first_line(data):
    return data.splitlines(keepends=True)[0]


def cut(data):
    return data[: len(data) * 4 // 10]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("metrics.csv", None),
        ("metrics.csv", first_line),
        ("rollouts.jsonl", None),
        ("rollouts.jsonl", first_line),
        ("rollouts.jsonl", cut),  # in the middle of step 2
        ("tokens/000002.npz", None),
        ("tokens/000002.npz", cut),
    ],
)
def test_a_file_that_is_missing_or_cut_is_named_before_the_model_is_loaded(
    recorded, run_path, tiny_model_path, tmp_path, name, damage
):
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_model_path), str(tmp_path / "no model")))
    path = run_path / name
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    for arguments in (
        ("replay", run_path, "--step", 2),
        ("replay", run_path, "--step", 2, "loss=dapo"),
        ("bisect", recorded, run_path),
        ("fork", run_path, f"run.path={tmp_path / 'forked'}", "--step", 2),
    ):
        called = call(*arguments)
        assert called.exit_code == 2 and name in called.output and "no model" not in called.output, called.output
    assert not (tmp_path / "forked").exists()


def test_a_damaged_checkpoint_is_refused_by_steps_that_use_its_weights(run_path):
    """Its checksum, which takes a second for each GB, is computed for those alone."""
    with (run_path / "checkpoint.safetensors").open("r+b") as file:
        file.seek(5000)  # within the first tensor
        damaged = bytes(255 - byte for byte in file.read(4))
        file.seek(5000)
        file.write(damaged)
    assert call("replay", run_path, "--step", 1, "--quantities", "metrics,weights").exit_code == 0
    for step in (3, 4):
        called = call("replay", run_path, "--step", step, "--quantities", "metrics,weights")
        assert called.exit_code == 2 and "checkpoint.safetensors is damaged" in " ".join(called.output.split())


def test_a_reward_file_that_cannot_be_executed_is_named(run_path, tmp_path):
    path = tmp_path / "needs_more.py"
    path.write_text("import a_package_of_another_machine\n")
    for name in ("rescore", "replay"):
        step = ("--step", 2, "--quantities", "rewards") if name == "replay" else ()
        called = call(name, run_path, *step, "--reward", f"{path}:score")
        said = " ".join(called.output.split())
        assert called.exit_code == 2 and "needs_more.py raises ModuleNotFoundError" in said, said


def with_program(folder):
    """Let the configuration name a model that asks to run its own file."""
    model = folder / "model"
    for name in ("config.json", "tokenizer_config.json"):
        asked = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}}
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | asked))
    (model / "own.py").write_text(f"open({str(folder / 'was executed')!r}, 'w')\n")
    return model


def with_pickle(folder):
    (folder / "model" / "model.safetensors").unlink()
    pickled = pickle.dumps(Touch(folder / "was executed"))
    (folder / "model" / "pytorch_model.bin").write_bytes(pickled)
    return folder / "model"


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


@pytest.mark.parametrize("make_model", [with_program, with_pickle])
def test_a_model_that_a_folder_names_runs_nothing_and_asks_nothing(run_path, tiny_model_path, make_model):
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_model_path), str(make_model(run_path))))
    called = CliRunner().invoke(app, ["replay", str(run_path), "--step", "2"], input="y\ny\n")
    assert called.exit_code == 2 and "[y/N]" not in called.output and str(run_path) in called.output.replace("\n", "")
    assert not (run_path / "was executed").exists()


def repeat_entries(path):
    texts = "".join(f"a{place + 1}: '${{a{place}}}${{a{place}}}'\n" for place in range(40))
    (path / "config.yaml").write_text(f"a0: long\n{texts}")


def nest(path):
    with (path / "rollouts.jsonl").open("a") as file:
        file.write('{"a":' + "[" * 100_000 + "\n")


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: os.truncate(path / "rollouts.jsonl", 1 << 40), "rollouts.jsonl takes 1100 GB"),
        (lambda path: write_zeros(path / "tokens" / "000002.npz", 1 << 40), "000002.npz is damaged"),
        (repeat_entries, "computed for more than"),
        (nest, ""),
    ],
    ids=["holes", "zeros", "repeated entries", "nested"],
)
def test_a_file_that_grows_when_it_is_read_is_refused(recorded, run_path, monkeypatch, damage, expected):
    monkeypatch.setattr(resumed, "_READING_SECONDS", 0.5)
    damage(run_path)
    called = call("bisect", recorded, run_path)
    assert called.exit_code == (2 if expected else 0) and expected in " ".join(called.output.split())


def write_zeros(path, num_tokens):
    """Let an array of a step say that it has so many numbers."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<i4", "fortran_order": False, "shape": (num_tokens,)})
    with np.load(path) as data:
        arrays = {name: array for name, array in data.items() if name != "token_ids"}
    np.savez(path.open("wb"), **arrays)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("token_ids.npy", head.getvalue())


def test_what_a_folder_writes_steers_no_terminal(run_path, rewards):
    edit_jsonl(
        run_path / "rollouts.jsonl", lambda one: {**one, "rollout_id": one["rollout_id"] + "\x1b]52;c;AA\x07[b]"}
    )
    called = call("rescore", run_path, "--reward", f"{rewards}:negative")
    assert called.exit_code == 0 and "\x1b]52" not in called.output and "\\x1b" in called.output


def test_the_page_of_other_rewards_begins_with_the_largest_change(recorded, rewards, tmp_path):
    page = tmp_path / "page.html"
    called = call("rescore", recorded, "--reward", f"{rewards}:negative", "--json", "--page", page)
    [most, *_] = json.loads(called.output)["most_changed"]
    blocks = re.findall(r'id="block-\d+">([^<]+)<', page.read_text())
    shown = [one for block in blocks for one in json.loads(gzip.decompress(base64.b64decode(block)))]
    changed = next(one for one in shown[1:] if one["rollout_id"] == shown[0]["rollout_id"])
    assert abs(shown[0]["reward"] - changed["reward"]) == approx(abs(most["before"] - most["after"]))
    assert changed["reward"] == approx(-shown[0]["reward"])


def test_more_ranks_than_cores_are_one(run_path):
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace("num_ranks: 1", "num_ranks: 300"))
    found = json.loads(call("replay", run_path, "--step", 2, "--quantities", "metrics", "--json").output)
    assert found["changed_here"] == {"train.num_ranks": [300, 1]} and found["first_difference"] is None


def test_a_task_whose_data_is_not_here_leaves_the_other_quantities(run_path):
    config = run_path / "config.yaml"
    config.write_text(
        config.read_text().replace("name: train", "name: gsm8k").replace("data: null", "data: none.jsonl")
    )
    called = call("replay", run_path, "--step", 2, "--quantities", "rewards,advantages", "--json")
    rewards, advantages = json.loads(called.output)["quantities"]
    assert called.exit_code == 0 and "--reward" in rewards["note"] and advantages["is_equal"]
