"""A run that was killed, at whatever moment, ends as one that was not."""

from __future__ import annotations

import csv
import json
import os
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future

import killed_runs
import pytest
import torch
from killed_runs import NUM_STEPS, Scheme, train
from warm_processes import run_warm

from llmrl.runs.batch_source import BatchSource
from llmrl.runs.evaluation import Evaluator
from llmrl.runs.run import Run
from llmrl.runs.run_folder import RunFolder

# The long form: LLMRL_NUM_KILLS=100.
NUM_KILLS = int(os.environ.get("LLMRL_NUM_KILLS", "10"))
KNOWN = ("eval/sums/pass@1", "eval/sums/reward", "reward_mean", "learning_rate", "policy_version")


@pytest.mark.timeout(120 + 60 * NUM_KILLS)
def test_whenever_a_run_is_killed_it_ends_with_the_weights_of_one_that_was_not(model_path, tmp_path, own_programs):
    command = [sys.executable, killed_runs.__file__, str(tmp_path), str(NUM_KILLS), "0"]
    result = run_warm(command)
    assert result.returncode == 0, result.stdout + result.stderr
    whole = json.loads((tmp_path / "whole/weights.json").read_text())
    moved = [value for values in whole["weights"].values() for value in values]
    assert whole["version"] == 5 and moved  # then patience is over
    killed = sorted(tmp_path.glob("killed-*"))
    assert len(killed) == NUM_KILLS
    for path in killed:
        assert json.loads((path / "weights.json").read_text()) == whole, (path.name, result.stdout)
        assert table(path, KNOWN) == table(tmp_path / "whole", KNOWN)
        best = "model-best/weights.json"
        assert (path / best).read_text() == (tmp_path / "whole" / best).read_text()
        places = [(record["step"], record["split"]) for record in records(path)]
        assert Counter(places) == Counter((one["step"], one["split"]) for one in records(tmp_path / "whole"))
        assert not list(path.rglob(".*.tmp"))


def records(path):
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


def table(path, names):
    """Step and name to value; what was logged twice, before and after a kill, is there once."""
    with (path / "metrics.csv").open(newline="") as file:
        return {(row["step"], name): row[name] for row in csv.DictReader(file) for name in names if row.get(name)}


@pytest.mark.slow
def test_a_checkpoint_of_a_replayed_step_is_written_before_the_next_step_changes_it(renderer, tmp_path, monkeypatch):
    monkeypatch.setattr(
        RunFolder, "save_checkpoint", lambda self, state, **options: None
    )  # so that every step is replayed
    train(tmp_path, renderer, resume=False)
    written = []

    def save_slowly(self, state, **options):
        weights = state["tracked"]["model"]["weight"]
        before = weights.clone()
        time.sleep(0.2)
        written.append((state["step"], torch.equal(weights, before)))

    monkeypatch.setattr(RunFolder, "save_checkpoint", save_slowly)
    train(tmp_path, renderer, resume=True)
    assert written == [(2, True), (4, True)]


class SlowScheme(Scheme):
    """The engine has new weights when the run calls the next of what is watched; one update may fail."""

    called = threading.Event()
    failing_update = -1
    num_updates = 0

    def start_update(self):
        update, self.num_updates = Future(), self.num_updates + 1
        number = self.num_updates
        # A new event, as a thread that begins late could miss that the one of all updates was set.
        called = SlowScheme.called = threading.Event()

        def load():
            assert called.wait(600)
            if not update.set_running_or_notify_cancel():
                return
            if number == self.failing_update:
                update.set_exception(RuntimeError("the engine is gone"))
            else:
                update.set_result(self.update_weights())

        threading.Thread(target=load, daemon=True).start()
        return update


@pytest.fixture
def watched(monkeypatch):
    """What the run did, in order: steps that came to their update, and versions that were evaluated."""
    events = []

    def watch(owner, name, event):
        function = getattr(owner, name)

        def call(*arguments, **options):
            events.append(event(*arguments, **options))
            SlowScheme.called.set()
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    watch(Run, "timer", lambda run, name: (run._step, "trained", run._collector._source.engine.policy_version))
    watch(Run, "evaluate", lambda run, step, evaluator: (step, "is to be evaluated"))
    watch(BatchSource, "close", lambda source: "the loop ends")
    watch(Evaluator, "evaluate", lambda evaluator: evaluator.policy.engine.policy_version)
    return events


def test_training_goes_on_while_engines_load_and_an_evaluation_waits_for_them(renderer, tmp_path, watched):
    train(tmp_path, renderer, resume=False, max_staleness=1, make_scheme=SlowScheme)
    # The second and the fourth step were trained when the engine did not have the weights of the one before.
    trained = [(1, "trained", 0), (2, "trained", 0), (3, "trained", 2), (4, "trained", 2), (5, "trained", 4)]
    begun, second, fourth = ([(step, "is to be evaluated"), step] for step in (0, 2, 4))
    assert watched == [*begun, *trained[:2], *second, *trained[2:4], *fourth, trained[4], "the loop ends"]
    assert json.loads((tmp_path / "weights.json").read_text())["version"] == NUM_STEPS
    versions = table(tmp_path, ["policy_version"])
    assert {int(step): float(version) for (step, _), version in versions.items()} == {n: n for n in range(1, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("failing_update", [1, 4, 5])
def test_an_update_that_fails_ends_the_run_which_goes_on_later(
    renderer, tmp_path, watched, monkeypatch, failing_update
):
    monkeypatch.setattr(SlowScheme, "failing_update", failing_update)
    with pytest.raises(RuntimeError, match="the engine is gone"):
        train(tmp_path, renderer, resume=False, max_staleness=1, make_scheme=SlowScheme)
    assert max(event[0] for event in watched if isinstance(event, tuple)) <= failing_update + 1
    train(tmp_path, renderer, resume=True, max_staleness=1)
    assert json.loads((tmp_path / "weights.json").read_text())["version"] == NUM_STEPS
    assert {int(step) for step, _ in table(tmp_path, ["policy_version"])} == set(range(1, NUM_STEPS + 1))
