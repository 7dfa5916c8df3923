"""Recorded runs: steps computed again, planted bugs, what would have been, forks."""

from __future__ import annotations

import base64
import contextlib
import gzip
import importlib
import json
import math
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import yaml
from opened_pages import opened
from pytest import approx
from recorded_runs import NUM_STEPS, call, edit_jsonl, make_agent, train_run
from tensordict import TensorDict, lazy_stack
from weight_sync_tools import TakingEngine

from llmrl import TransformersEngine
from llmrl.data.state_file import load_state, save_state
from llmrl.objectives import MCAdvantage
from llmrl.replay.page import write_what_if
from llmrl.replay.recorded import RecordedRun
from llmrl.replay.rescore import rank_correlation
from llmrl.replay.rewards import advantages_of
from llmrl.replay.step import replay_steps
from llmrl.replay.what_if import what_if
from llmrl.runs.run_folder import RunFolder
from llmrl.watch.tracking import as_recorded


def results_of(replayed):
    return {one.quantity: one.is_equal for one in replayed.compared if one.num_values}


def test_every_step_is_computed_again_bit_by_bit(recorded, rewards):
    run = RecordedRun(recorded)
    assert run.steps == [1, 2, 3, 4]
    # In one pass from the initial model, through the checkpoint; and again those that have a start of their own.
    for steps in (run.steps, [3], [4]):
        replayed = replay_steps(run, steps, reward=f"{rewards}:length")
        assert [one.step for one in replayed] == steps
        for one in replayed:
            expected = dict.fromkeys(("prompts", "rewards", "advantages", "log_probs", "metrics"), True)
            assert results_of(one) == expected | ({"weights": True} if one.step == 3 else {}), one
            assert one.first_difference is None


@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 4},
        {"kl_to_ref_coeff": 0.1, "loss": "dapo"},
        {"num_epochs": 2, "num_minibatches": 2, "schedule": "linear"},
        {"make_env": make_agent, "max_turns": 3, "max_new_tokens": 4},
    ],
    ids=["adapters", "reference", "several updates", "agent"],
)
def test_steps_of_other_runs_are_computed_again_bit_by_bit(tiny_model_path, tmp_path, takes_long, options):
    run = RecordedRun(train_run(tiny_model_path, tmp_path / "run", **options))
    for steps in ([1], [4]):
        [replayed] = replay_steps(run, steps, quantities=["advantages", "log_probs", "metrics", "weights"])
        assert all(results_of(replayed).values()) and len(results_of(replayed)) >= 2, replayed


def test_steps_on_answers_of_older_weights_are_computed_again_bit_by_bit(tiny_model_path, tmp_path, takes_long):
    run = RecordedRun(train_run(tiny_model_path, tmp_path / "run", max_staleness=2, num_steps=5))
    ages = {step: {step - 1 - one for row in run.rows(step) for one in row.versions if one >= 0} for step in run.steps}
    assert max(ages[4] | ages[5]) > 0, ages  # trained on what an older version had sampled
    for replayed in replay_steps(run, [4, 5], quantities=["advantages", "log_probs", "metrics"]):
        assert all(results_of(replayed).values()) and len(results_of(replayed)) == 3, replayed


class UpdatableTransformersEngine(TransformersEngine, TakingEngine):
    """Generates with transformers, and takes weights as vLLM's engines do; what it takes has no effect."""

    load_weights, model_dtype, num_workers = None, torch.float32, 1
    fails_at = dies_at = hangs_at = None

    def __init__(self, model):
        super().__init__(model)
        self.calls = []


@pytest.mark.parametrize("original_length", [20, 60])
def test_the_first_step_has_the_rotary_frequencies_of_the_engine_and_is_computed_again_with_them(
    tiny_model_path, tmp_path, monkeypatch, takes_long, original_length
):
    """The engine's rows have the long frequencies of LongRoPE, also those that do not exceed the original length."""
    long = [1.0 + place for place in range(32)]
    for name, short in (("model", [1.0] * 32), ("engine", long)):  # the reference has only one set
        folder = shutil.copytree(tiny_model_path, tmp_path / name)
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": original_length}
        edited = json.loads((folder / "config.json").read_text())
        edited["rope_parameters"] = rope | {"short_factor": short, "long_factor": long}
        (folder / "config.json").write_text(json.dumps(edited))
    engine = UpdatableTransformersEngine(tmp_path / "engine")
    monkeypatch.setattr("llmrl.scripts.train.start_engine", lambda cfg: contextlib.nullcontext(engine))
    run = RecordedRun(train_run(str(tmp_path / "model"), tmp_path / "run", engine=None, num_steps=1))
    assert all(20 < len(row.token_ids) < 60 for row in run.rows(1))
    assert run.metrics(1)["log_prob_difference_mean"] < 1e-4
    [replayed] = replay_steps(run, [1], quantities=["log_probs", "metrics"])
    assert results_of(replayed) == {"log_probs": True, "metrics": True}, replayed


def test_a_reward_function_that_has_changed_is_the_first_difference(run_path, rewards):
    called = call(
        "replay", run_path, "--step", 2, "--reward", f"{rewards}:negative", "--quantities", "rewards", "--json"
    )
    found = json.loads(called.output)
    assert called.exit_code == 1 and found["first_difference"] == "rewards"
    [rewards_found] = found["quantities"]
    assert rewards_found["where"].startswith("reward of rollout") and rewards_found["num_values"] == 8
    assert rewards_found["computed"] == approx(-rewards_found["recorded"]) != 0


def test_a_reward_function_of_another_name_is_compared_with_the_whole_reward(run_path, rewards):
    arguments = ("replay", run_path, "--step", 2, "--quantities", "rewards", "--json", "--reward")
    # A rollout that was cut has the reward of its status, which the function does not decide.
    path = run_path / "rollouts.jsonl"
    first = next(one for one in map(json.loads, path.read_text().splitlines()) if one["step"] == 2)["rollout_id"]
    of_status = {"reward": -3.0, "reward_breakdown": {}}
    edit_jsonl(path, lambda one: {**one, **of_status} if one["rollout_id"] == first else one)
    called = call(*arguments, f"{rewards}:grade")
    [found] = json.loads(called.output)["quantities"]
    assert called.exit_code == 0 and found["is_equal"] and found["num_values"] == 7
    # Of several functions the named one is compared with its own value.
    edit_jsonl(
        path,
        lambda one: {
            **one,
            "reward": 9.0,
            "reward_breakdown": one["reward_breakdown"] and {**one["reward_breakdown"], "style": 1.0},
        },
    )
    [found] = json.loads(call(*arguments, f"{rewards}:length").output)["quantities"]
    assert found["is_equal"] and found["num_values"] == 7


def test_a_random_reward_is_told_from_a_changed_one(run_path, rewards):
    edit_jsonl(run_path / "rollouts.jsonl", lambda one: {**one, "reward_breakdown": {"noise": 0.5}})
    called = call("replay", run_path, "--step", 2, "--reward", f"{rewards}:noise", "--quantities", "rewards")
    assert called.exit_code == 1 and "another value each time" in " ".join(called.output.split())


def test_a_reward_that_a_newer_library_changes_is_found_where_it_differs(run_path, tmp_path, monkeypatch):
    """The function is the same; the package that it uses rounds otherwise in its next version."""
    monkeypatch.syspath_prepend(tmp_path)
    reward = tmp_path / "graded.py"
    reward.write_text("import grading\n\ndef length(completion):\n    return grading.grade(completion)\n")
    arguments = ("replay", run_path, "--step", 2, "--reward", f"{reward}:length", "--quantities", "rewards", "--json")
    for version, expected in (("", 0), (" + 0.5 * (len(text) % 7 == 6)", 1)):
        (tmp_path / "grading.py").write_text(f"def grade(text):\n    return len(text) % 7 / 7{version}\n")
        monkeypatch.delitem(sys.modules, "grading", raising=False)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        importlib.invalidate_caches()
        called = call(*arguments)
        found = json.loads(called.output)["quantities"][0]
        assert called.exit_code == expected and found["num_values"] == 8, found
    changed = [one["rollout_id"] for one in RecordedRun(run_path).records(2) if one["reward"] == approx(6 / 7)]
    assert found["where"] == f"length of rollout {changed[0]}" and found["max_difference"] == approx(0.5)


def test_a_template_of_another_version_is_named_by_replay_and_by_bisect(recorded, tiny_model_path, tmp_path):
    model = shutil.copytree(tiny_model_path, tmp_path / "model")
    template = model / "chat_template.jinja"
    changed = template.read_text().replace("<|im_start|>", "<|im_start|> ")
    assert changed != template.read_text()
    template.write_text(changed)
    run_path = shutil.copytree(recorded, tmp_path / "run")
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace(str(tiny_model_path), str(model)))
    called = call("replay", run_path, "--step", 2, "--quantities", "prompts,advantages", "--json")
    found = json.loads(called.output)
    assert called.exit_code == 1 and found["first_difference"] == "prompts"
    assert found["quantities"][0]["where"].startswith("token 1 of the prompt")
    train_run(model, tmp_path / "other", num_steps=1)
    called = call("bisect", recorded, tmp_path / "other", "--json", "--page", tmp_path / "page.html")
    parting = json.loads(called.output)["first_difference"]
    assert (parting["step"], parting["quantity"]) == (1, "token_ids") and "chat template" in parting["meaning"]
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_of_several_steps_the_one_that_differs_is_named_by_the_exit_code_and_its_object(run_path, rewards):
    path = run_path / "rollouts.jsonl"
    edit_jsonl(path, lambda one: {**one, "reward": 9.0, "reward_breakdown": {}} if one["step"] == 3 else one)
    arguments = ("replay", run_path, "--step", 2, "--reward", f"{rewards}:length", "--quantities", "rewards,prompts")
    called = call(*arguments, "--last-step", 4, "--json")
    found = {one["step"]: one["first_difference"] for one in json.loads(called.output)["steps"]}
    assert called.exit_code == 1 and found == {2: None, 3: "rewards", 4: None}
    called = call(*arguments, "--last-step", 2)
    assert called.exit_code == 0 and "step 2" in called.output
    called = call(*arguments, "--last-step", 1)
    assert called.exit_code == 2 and "last_step must be at least" in " ".join(called.output.split())
    called = call(*arguments, "--last-step", 5)
    assert called.exit_code == 2 and "(1 to 4), got 5" in " ".join(called.output.split())


def test_an_advantage_of_the_wrong_sign_is_found(run_path):
    tokens = run_path / "tokens" / "000002.npz"
    with np.load(tokens) as data:
        arrays = {**data, "advantages": -data["advantages"]}
    np.savez_compressed(tokens.open("wb"), **arrays)
    called = call("replay", run_path, "--step", 2, "--quantities", "advantages", "--json")
    assert called.exit_code == 1 and json.loads(called.output)["first_difference"] == "advantages"


def test_other_weights_are_found_at_the_first_token_with_another_log_prob(run_path):
    checkpoint = load_state(run_path / "checkpoint.safetensors", advice="")
    weights = checkpoint["tracked"]["model"]
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] = weights[name] + 1.0  # many times what is rounding
    save_state(run_path / "other.safetensors", checkpoint)
    (run_path / "other.safetensors").replace(run_path / "checkpoint.safetensors")
    called = call("replay", run_path, "--step", 4, "--quantities", "advantages,log_probs,metrics", "--json")
    found = json.loads(called.output)
    assert called.exit_code == 1 and found["first_difference"] == "log_probs"
    assert "token" in found["quantities"][1]["where"]


def test_another_loss_is_found_in_the_metrics(run_path):
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace("loss: grpo", "loss: cispo"))
    [replayed] = replay_steps(RecordedRun(run_path), [2], quantities=["log_probs", "metrics"])
    assert replayed.first_difference.quantity == "metrics"


def test_a_run_of_other_ranks_and_devices_says_what_this_machine_computes_otherwise(run_path, tmp_path, monkeypatch):
    """The run was made here, on one rank of the CPU; its configuration is that of two GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    config = run_path / "config.yaml"
    text = config.read_text().replace("device: cpu", "device: cuda").replace("num_ranks: 1", "num_ranks: 2")
    config.write_text(text.replace("context_ranks: 1", "context_ranks: 2"))
    machines = run_path / "machines.jsonl"
    here = json.loads(machines.read_text())
    assert here["step"] == 1 and here["threads"] == torch.get_num_threads() and here["torch"] == torch.__version__
    others = (
        {"step": 1, "processor": "H100", "torch": "2.0"},
        here | {"step": 2, "threads": 64},
        {"step": 3, "torch": "9"},
    )
    machines.write_text("".join(f"{json.dumps(one)}\n" for one in others))
    found = json.loads(call("replay", run_path, "--step", 2, "--quantities", "metrics", "--json").output)
    trainer = {"train.device": ["cuda", "cpu"], "train.num_ranks": [2, 1], "train.context_ranks": [2, 1]}
    assert found["changed_here"] == trainer | {"threads": [64, torch.get_num_threads()]}
    assert found["first_difference"] is None
    called = call("fork", run_path, f"run.path={tmp_path / 'forked'}", "--step", 2)
    said = " ".join(called.output.split())
    assert called.exit_code == 0 and "train.num_ranks is 1 in place of 2" in said
    assert f"llmrl view {run_path} {tmp_path / 'forked'}" in said


def test_a_rank_s_threads_are_compared_and_not_those_of_the_process_that_starts_it(run_path, monkeypatch):
    machines = run_path / "machines.jsonl"
    machines.write_text(json.dumps(json.loads(machines.read_text()) | {"threads": 3}) + "\n")

    def call_with_other_threads(num_ranks, function, *arguments):
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            return function(*arguments)
        finally:
            torch.set_num_threads(before)

    monkeypatch.setattr("llmrl.replay.loop.call_on_ranks", call_with_other_threads)
    for one in replay_steps(RecordedRun(run_path), [1, 2], quantities=["metrics"]):
        assert one.changed_here == {}


def test_the_reward_with_the_other_sign_turns_every_advantage_and_the_gradient(recorded, rewards, tmp_path):
    changed = what_if(RecordedRun(recorded), 2, reward=f"{rewards}:negative")
    num_unequal = sum(abs(before) > 1e-5 for before, _ in changed.steps[0].advantages.values())
    assert len(changed.steps[0].turned) == num_unequal > 0
    assert changed.gradient_cosine == pytest.approx(-1.0, abs=1e-4)
    page = write_what_if(RecordedRun(recorded), changed, tmp_path / "page.html")
    packed = re.search(r'id="block-0">([^<]+)<', page.read_text()).group(1)
    shown = json.loads(gzip.decompress(base64.b64decode(packed)))
    for one in shown[len(shown) // 2 :]:
        before, after = changed.steps[0].advantages[one["rollout_id"]]
        assert one["columns"]["advantage"] == f"{before:.4g} → {after:.4g}"
        assert one["rows"][0]["advantage"] == after == approx(-before, abs=1e-6)
        real = next(other["reward"] for other in shown if other["rollout_id"] == one["rollout_id"])
        assert one["reward"] == approx(-real)
    same = what_if(RecordedRun(recorded), 2, reward=f"{rewards}:length")
    assert same.steps[0].turned == [] and same.gradient_cosine == pytest.approx(1.0, abs=1e-6)


def test_rollouts_that_a_what_if_has_no_rows_of_are_named(run_path, rewards):
    """The group had a signal, but its rows are removed from the batch, as those of a group without one are."""
    path = run_path / "batches" / "000002.safetensors"
    saved = load_state(path, advice="")
    group = saved["batch"]["rollout", "group_id"][0]
    rows = [row for row in saved["batch"].unbind(0) if row["rollout", "group_id"] != group]
    save_state(path.with_suffix(".new"), {**saved, "batch": lazy_stack(rows)})  # the old one is mapped
    path.with_suffix(".new").replace(path)
    expected = {
        row.rollout_id
        for row in RecordedRun(run_path).rows(2)
        if row.rollout_id.startswith(f"{group}/") and abs(row.advantage) > 1e-5
    }
    called = call("replay", run_path, "--step", 2, "--what-if", "--reward", f"{rewards}:negative", "--json")
    [step] = json.loads(called.output)["steps"]
    assert set(step["left_out"]) == expected and expected and not expected & step["advantages"].keys()
    called = call("replay", run_path, "--step", 2, "model.lora.rank=4")
    assert called.exit_code == 2 and "model.lora" in called.output


def test_the_page_of_a_what_if_shows_both_sides(recorded, rewards, tmp_path, own_programs):
    page = tmp_path / "page.html"
    called = call("replay", recorded, "--step", 2, "--what-if", "--reward", f"{rewards}:negative", "--page", page)
    assert called.exit_code == 0, called.output
    turned = what_if(RecordedRun(recorded), 2, reward=f"{rewards}:negative").steps[0].turned
    with opened(page) as shown:
        assert "gradient cosine -1" in shown.inner_text("#summary").replace("\n", " ")
        shown.select_option("#run", "1")
        shown.locator(".item").first.click()
        shown.wait_for_function("document.querySelector('#rollout').innerText.includes('→')")
        assert any(name in shown.inner_text("#rollout") for name in turned)


def fork_with_batches(run, path, *changes):
    """Fork a run after step 2, with the batches that it has made afterwards, since an engine samples others."""
    called = call("fork", run, f"run.path={path}", *changes, "--step", 2, "--json")
    found = json.loads(called.output)
    assert (found["path"], found["step"]) == (str(path), 2)
    assert found["changes"].keys() == {"run.path", *(change.partition("=")[0] for change in changes)}
    for step in (3, 4):
        shutil.copy(run / "batches" / f"{step:06d}.safetensors", path / "batches")
    return path


def test_what_would_have_been_is_what_a_run_from_there_does(tiny_model_path, run_path, tmp_path):
    """The changed steps of what_if are the next steps of a fork with the change, on the same batches."""
    changed = what_if(RecordedRun(run_path), 3, last_step=4, changes=["train.importance_cap=0.5"])
    forked = fork_with_batches(run_path, tmp_path / "forked", "train.importance_cap=0.5")
    train_run(tiny_model_path, forked, resume=True, importance_cap=0.5)
    before, after = changed.steps[0].metrics["grad_norm"]
    assert after == pytest.approx(before / 2, rel=1e-4)
    assert changed.gradient_cosine == pytest.approx(1.0, abs=1e-6) and changed.update_cosine < 1
    logged = {row["step"]: row for row in RunFolder(forked, read_only=True).read_metrics()}
    for step in changed.steps:
        compared = {name: after for name, (_, after) in step.metrics.items() if not name.startswith("on_policy")}
        assert len(compared) > 10
        for name, after in compared.items():
            assert logged[step.step][name] == as_recorded(after), name


def test_another_model_begins_the_changed_side_only(recorded, tiny_model_path, tmp_path):
    """The checkpoint's model is not put over it: with the initial model, step 4 computes what it computes as step 1."""
    other = shutil.copytree(tiny_model_path, tmp_path / "other")
    changed = what_if(RecordedRun(recorded), 4, changes=[f"model.path={other}"])
    before, after = changed.steps[0].metrics["entropy"]
    assert before == pytest.approx(RecordedRun(recorded).metrics(4)["entropy"], rel=1e-5) and after != before
    first = RecordedRun(recorded).metrics(1)["entropy"]
    assert abs(after - first) < abs(before - first)
    called = call("replay", recorded, "--step", 4, "--last-step", 3, "loss=dapo")
    assert called.exit_code == 2 and "last_step" in called.output


def test_a_fork_without_changes_goes_on_as_the_run_did(tiny_model_path, recorded, tmp_path):
    train_run(tiny_model_path, fork_with_batches(recorded, tmp_path / "forked"), resume=True)
    called = call("bisect", recorded, tmp_path / "forked", "--json")
    assert json.loads(called.output)["first_difference"] is None, called.output
    ours, theirs = (
        load_state(path / "checkpoint.safetensors", advice="")["tracked"]["model"]
        for path in (recorded, tmp_path / "forked")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    called = call("fork", recorded, f"run.path={tmp_path / 'forked'}", "--step", 2)
    assert called.exit_code == 2 and "exists already" in " ".join(called.output.split())


@pytest.mark.parametrize("name", ["a #2", "1e3", "${x}"])
def test_a_fork_is_in_the_folder_that_is_named_and_keeps_texts_and_first_results(run_path, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((run_path / "config.yaml").read_text())
    config["sync"] |= {"transport": "files", "folder": "\\${x}"}  # as a text that has no reference is saved
    (run_path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {"before": {"sums": {"reward": 0.25}}, "after": {"sums": {"reward": 0.5}}}
    (run_path / "summary.json").write_text(json.dumps(summary))
    called = call("fork", run_path, f"run.path={name}", "--step", 2)
    assert called.exit_code == 0, called.output
    forked = RecordedRun(tmp_path / name)
    assert forked.steps == [1, 2] and forked.config().run.path == name
    assert forked.config().sync.folder == "${x}"
    assert forked.folder.read_summary() == {"before": summary["before"]}


@pytest.mark.parametrize("change", ["seed=5", "env.name=guess", "env.options.a=1", "model.path=x"])
def test_a_fork_is_of_the_same_task_model_and_order_of_prompts(recorded, tmp_path, change):
    called = call("fork", recorded, f"run.path={tmp_path / 'forked'}", change, "--step", 2)
    said = " ".join(called.output.split())
    assert called.exit_code == 2 and f"has {change.partition('=')[0]}=" in said and "cannot continue" in said
    assert not (tmp_path / "forked").exists()


def test_two_runs_part_at_the_step_where_one_of_them_was_changed(tiny_model_path, recorded, tmp_path):
    forked = fork_with_batches(recorded, tmp_path / "forked", "train.learning_rate=0.02")
    train_run(tiny_model_path, forked, resume=True, learning_rate=0.02)
    called = call("bisect", recorded, tmp_path / "forked", "--json")
    found = json.loads(called.output)
    assert called.exit_code == 1 and found["config"] == {"train.learning_rate": [0.01, 0.02]} and not found["machine"]
    # Step 3 was sampled by equal weights and updated by another rate; what it left is seen in step 4.
    assert (found["first_difference"]["step"], found["first_difference"]["quantity"]) in (
        (3, "learning_rate"),
        (3, "weight_change"),
    )


def test_a_number_that_one_run_alone_has_is_a_difference_in_either_order(recorded, tmp_path):
    other = shutil.copytree(recorded, tmp_path / "other")
    header, *rows = (other / "metrics.csv").read_text().splitlines()
    place = header.split(",").index("loss_objective")
    lines = [header]
    for row in rows:
        cells = row.split(",")
        lines.append(",".join([*cells[:place], "" if cells[0] == "2" else cells[place], *cells[place + 1 :]]))
    (other / "metrics.csv").write_text("\n".join(lines) + "\n")
    for runs in ((recorded, other), (other, recorded)):
        called = call("bisect", *runs, "--json")
        found = json.loads(called.output)["first_difference"]
        assert called.exit_code == 1 and (found["step"], found["quantity"]) == (2, "loss_objective")


def test_an_edited_token_is_where_two_runs_part(recorded, run_path, tmp_path, own_programs):
    tokens = run_path / "tokens" / "000003.npz"
    with np.load(tokens) as data:
        arrays = dict(data)
    place = int(arrays["lengths"][0]) + 2
    arrays["token_ids"][place] += 1
    np.savez_compressed(tokens.open("wb"), **arrays)
    page = tmp_path / "page.html"
    called = call("bisect", recorded, run_path, "--page", page)
    assert called.exit_code == 1 and "Step 3: token_ids differs" in called.output and "token 2" in called.output
    name = arrays["rollout_ids"][1]
    with opened(page) as shown:
        assert f"token_ids, row 0 of rollout {name}, token 2" in shown.inner_text("#summary")
        assert shown.locator("#groups code").all_inner_texts() == [
            f"llmrl replay {path} --step 3" for path in (recorded, run_path)
        ]
        shown.locator(".item").first.click()
        shown.wait_for_function(f"document.querySelector('#rollout').innerText.includes('{name}')")
    assert call("bisect", recorded, recorded).exit_code == 0


def test_rewards_of_another_function_are_compared_with_the_recorded_ones(recorded, rewards):
    found = json.loads(call("rescore", recorded, "--reward", f"{rewards}:negative", "--json").output)
    assert found["num_rollouts"] == 4 * NUM_STEPS * 2 and found["num_unscored"] == 0
    assert found["correlation"] == pytest.approx(-1.0) and found["swapped_share"] == 1.0
    assert found["signal_share"][0] == found["signal_share"][1]
    changes = [abs(one["before"] - one["after"]) for one in found["most_changed"]]
    assert changes == sorted(changes, reverse=True) and changes[0] > 0
    assert "Rank correlation of the rewards: 1.000" in call("rescore", recorded, "--reward", f"{rewards}:length").output
    called = call("rescore", recorded, "--reward", f"{rewards}:missing")
    assert called.exit_code == 2 and "no function 'missing'" in called.output


@pytest.mark.parametrize("by", ["role", None])
def test_advantages_of_a_game_are_those_of_training(by):
    rewards = {"first": (1.0, 0.5, 0.0, 1.0), "second": (0.0, 0.0, 1.0, 0.25)}
    records = [
        {"rollout_id": f"{role}{game}", "group_id": "g", "role": role, "reward": of_role[game]}
        for game in range(4)
        for role, of_role in rewards.items()
    ]
    names = ("rollout_id", "group_id", "role")
    rows = [
        TensorDict({"rollout": {name: one[name] for name in names}, "next": {"reward": [[one["reward"]]]}})
        for one in records
    ]
    trained = MCAdvantage(by=by)(lazy_stack(rows))
    expected = dict(zip(trained["rollout", "rollout_id"], trained["advantage"].flatten().tolist(), strict=True))
    assert advantages_of(records, "std", by_role=by == "role") == approx(expected, abs=1e-6)


@pytest.mark.parametrize(("algorithm", "is_equal"), [("grpo", False), ("distillation", True)])
def test_roles_are_compared_apart_where_the_script_does_so(run_path, algorithm, is_equal):
    """The run compared all rollouts of a group, as the script of distillation does for the roles of a game."""
    edit_jsonl(run_path / "rollouts.jsonl", lambda one: {**one, "role": f"player {one['sample_index'] % 2}"})
    config = run_path / "config.yaml"
    config.write_text(config.read_text().replace("algorithm: grpo", f"algorithm: {algorithm}"))
    [replayed] = replay_steps(RecordedRun(run_path), [2], quantities=["advantages"])
    assert results_of(replayed) == {"advantages": is_equal}


def test_rank_correlation_is_that_of_pandas():
    pandas = pytest.importorskip("pandas")
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        first, second = torch.randint(0, 1 + trial % 6, (2, 20), generator=generator).tolist()
        expected = pandas.DataFrame([first, second]).T.corr(method="spearman").iloc[0, 1]
        found = rank_correlation(first, second)
        assert math.isnan(expected) if found is None else found == pytest.approx(expected)
