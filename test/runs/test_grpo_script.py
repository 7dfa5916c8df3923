"""A GRPO script, run as a person runs it, on real vLLM and a tiny model: it survives SIGKILL."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from biased_models import save_model_that_says
from transformers import AutoModelForCausalLM
from waiting import is_running
from warm_processes import WarmPopen, run_warm

SCRIPTS = Path(__file__).parents[2] / "sota-implementations" / "grpo"
SMALL = (
    *("task=ifeval", "env.train_split=train", "env.eval_split=train", "eval.num_samples=1", "eval.num_problems=4"),
    *("model.max_model_len=256", "collect.groups_per_batch=2", "collect.group_size=2", "collect.max_new_tokens=32"),
    "run.checkpoint_every=2",
    "engine.cpu_threads=1",
)
EOS = 2  # of the tokenizer of tiny models
# What a random model does in half of its answers.
PROBLEM = {
    "prompt": "Say something.",
    "instruction_id_list": ["length_constraints:number_words"],
    "kwargs": [{"relation": "at least", "num_words": 3}],
}


def read_csv(path):
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("policy_version")]


def descendants(pid):
    """Every process below `pid`."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for known in found:
        found += [child for child, parent in parents.items() if parent == known]
    return found[1:]


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory, real_vllm):
    """A run that was killed while it collected its fourth step, then resumed to its fifth.

    The asynchronous one: it has more to lose. The loop is that of the others, which run dry elsewhere.
    """
    script = "grpo-async.py"
    folder = tmp_path_factory.mktemp("grpo")
    run_path = folder / "run"
    # Rewards of answers that were cut do not differ.
    save_model_that_says(folder / "model", {EOS: 1 / 9})
    (folder / "problems.jsonl").write_text(f"{json.dumps(PROBLEM)}\n" * 100)
    begin = (*SMALL, f"model.path={folder / 'model'}", f"env.data={folder / 'problems.jsonl'}", "train.num_steps=50")
    with (folder / "first.log").open("w") as log:
        command = [sys.executable, str(SCRIPTS / script), f"run.path={run_path}", *begin]
        process = WarmPopen(command, stdout=log, stderr=log)
    children: list[int] = []
    try:
        deadline = time.monotonic() + 800
        while not (run_path / "metrics.csv").exists() or len(read_csv(run_path / "metrics.csv")) < 3:
            assert process.poll() is None, (folder / "first.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "three steps took more than 800 s"
            time.sleep(0.05)
        children = descendants(process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 120
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.2)
    orphans = [pid for pid in children if is_running(pid)]
    num_steps = len(read_csv(run_path / "metrics.csv"))
    # As the README says it: the run has its configuration.
    overrides = (
        f"run.path={run_path}",
        "resume=true",
        f"train.num_steps={num_steps + 2}",
        "train.learning_rate=1.5e-5",
    )
    resume = [sys.executable, str(SCRIPTS / script), *overrides]
    output = run_warm(resume, timeout=800)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return run_path, num_steps, orphans, output


def test_a_killed_run_leaves_no_process_behind(killed_and_resumed):
    _, _, orphans, _ = killed_and_resumed
    assert orphans == []


def test_resume_loses_nothing_but_the_unfinished_step(killed_and_resumed):
    run_path, num_steps, _, output = killed_and_resumed
    assert output.returncode == 0, output.stderr[-2000:]
    rows = read_csv(run_path / "metrics.csv")
    assert [int(row["step"]) for row in rows] == list(range(1, num_steps + 3))
    # Its fourth batch may have been written already, though nothing of it was logged.
    resumed_after = int(re.search(r"resumed after step (\d+)", output.stdout)[1])
    assert resumed_after in (num_steps, num_steps + 1)
    # The engine counts on from where it was.
    assert [float(row["policy_version"]) for row in rows] == [float(row["step"]) for row in rows]


def test_resume_has_the_configuration_of_the_run_and_shows_what_is_changed(killed_and_resumed):
    run_path, num_steps, _, output = killed_and_resumed
    config = (run_path / "config.yaml").read_text()
    for entry in ("groups_per_batch: 2", "group_size: 2", "learning_rate: 1.5e-05", f"num_steps: {num_steps + 2}"):
        assert entry in config
    assert "resumed with train.learning_rate=1.5e-05 in place of 1e-06" in output.stdout
    assert output.stdout.count("resumed with") == 2


def test_resume_continues_the_sequence_of_prompts(killed_and_resumed):
    run_path, num_steps, _, _ = killed_and_resumed
    records = [json.loads(line) for line in (run_path / "rollouts.jsonl").read_text().splitlines()]
    prompts_of_step = {}
    for record in records:
        if record["split"] == "train":
            prompts_of_step.setdefault(record["step"], []).append(record["group_id"])
    # Two groups of two, and as many again in the place of each batch that had nothing to learn from.
    assert all(len(groups) % 4 == 0 for groups in prompts_of_step.values())
    drawn = [group for step in sorted(prompts_of_step) for group in prompts_of_step[step]]
    assert len(prompts_of_step) == num_steps + 2 and set(Counter(drawn).values()) == {2}


def test_engine_and_trainer_agree_throughout(killed_and_resumed):
    run_path, _, _, _ = killed_and_resumed
    rows = read_csv(run_path / "metrics.csv")
    trained = [row for row in rows if float(row["num_trained_tokens"]) > 0]
    of_fresh = [float(row["log_prob_difference_mean"]) for row in trained if float(row["staleness_max"]) == 0]
    assert of_fresh and max(of_fresh) < 0.001  # float32 on both sides; older rows are of other weights
    assert all(math.isfinite(float(row["log_prob_difference_mean"])) for row in trained)


def test_a_finished_run_leaves_everything_it_promises(killed_and_resumed):
    run_path, _, _, output = killed_and_resumed
    for name in ("config.yaml", "metrics.csv", "rollouts.jsonl", "curve.png", "summary.json", "model/config.json"):
        assert (run_path / name).stat().st_size > 0
    assert list((run_path / "tensorboard").glob("events*"))
    summary = json.loads((run_path / "summary.json").read_text())
    assert set(summary) == {"before", "after", "ended"}
    assert "resume=true" in output.stdout
    model = AutoModelForCausalLM.from_pretrained(run_path / "model")
    assert str(next(model.parameters()).dtype) == "torch.float32"  # as it was served
