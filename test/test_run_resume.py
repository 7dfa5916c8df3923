"""A run that was killed, at whatever moment, ends as one that was not."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from killed_runs import train

from llmrl.runs.run_folder import RunFolder

NUM_KILLS = 10


def test_whenever_a_run_is_killed_it_ends_with_the_weights_of_one_that_was_not(model_path, tmp_path):
    script = Path(__file__).with_name("killed_runs.py")
    command = [sys.executable, str(script), str(tmp_path), str(NUM_KILLS), "0"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    whole = json.loads((tmp_path / "whole/weights.json").read_text())
    moved = [value for values in whole["weights"].values() for value in values]
    assert whole["version"] == 5 and moved
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == NUM_KILLS
    for path in killed:
        assert json.loads((path / "weights.json").read_text()) == whole, (path.name, result.stdout)
        evaluated = ("eval/sums/pass@1", "policy_version")
        assert table(path, evaluated) == table(tmp_path / "whole", evaluated)


def table(path, names):
    """Step and name to value; what was logged twice, before and after a kill, is there once."""
    with (path / "metrics.csv").open(newline="") as file:
        return {(row["step"], name): row[name] for row in csv.DictReader(file) for name in names if row.get(name)}


def test_a_checkpoint_of_a_replayed_step_is_written_before_the_next_step_changes_it(renderer, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "save_checkpoint", lambda self, state: None)  # so that every step is replayed
    train(tmp_path, renderer, resume=False)
    written = []

    def save_slowly(self, state):
        weights = state["tracked"]["model"]["weight"]
        before = weights.clone()
        time.sleep(0.2)
        written.append((state["step"], torch.equal(weights, before)))

    monkeypatch.setattr(RunFolder, "save_checkpoint", save_slowly)
    train(tmp_path, renderer, resume=True)
    assert written == [(2, True), (4, True)]
