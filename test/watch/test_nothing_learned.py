"""Runs in which nothing can be learned from: they say why, leave a record, and end soon."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console
from typer.testing import CliRunner

from llmrl import DatasetChatEnv, RubricReward, TransformersEngine, train
from llmrl.cli.app import app
from llmrl.collectors import CollectionStalled
from llmrl.collectors.groups import SIGNAL_PATIENCE
from llmrl.runs.run import NothingLearned
from llmrl.viewer import read_run


def always_zero(completion):
    return 0.0


def raises(completion):
    raise ValueError("no such column")


_numbers = itertools.count()


def differs(completion):
    """A reward that four answers never have in common, whatever a random model samples."""
    return next(_numbers) * 37 % 97 / 97


@pytest.fixture
def ended(tiny_model_path, tmp_path, monkeypatch):
    """Runs `train` with a reward; gives the run, what was printed, and the error that ended it."""

    def run(reward, *, num_steps=2, patience=4, repeats=4, **options):
        for module in ("collectors.base", "collectors.scheduler", "runs.recorder", "watch.metric_history"):
            monkeypatch.setattr(f"llmrl.{module}.SIGNAL_PATIENCE", patience)
        env = DatasetChatEnv([{"query": f"{a} + 1 =", "place": a} for a in range(6)], repeats=repeats, name="train")
        env = env.append_transform(RubricReward(reward))
        out = io.StringIO()
        engine = TransformersEngine(tiny_model_path)
        settings = {"path": tmp_path / "run", "groups_per_batch": 3, "max_new_tokens": 5, "learning_rate": 1e-2}
        settings |= {"engine": engine, "console": Console(file=out, width=300), "num_steps": num_steps}
        error = None
        try:
            train(tiny_model_path, env, **{**settings, **options})
        except (NothingLearned, CollectionStalled) as raised:
            error = raised
        finally:
            engine.shutdown()
        return read_run(tmp_path / "run"), out.getvalue(), error

    return run


def names(run, step=1):
    return {one["name"]: one for one in run.health[step]["findings"]}


def test_a_reward_that_is_always_zero_is_recorded_judged_and_shown(ended, tmp_path, takes_long):
    run, printed, error = ended(always_zero, patience=SIGNAL_PATIENCE, repeats=2, max_new_tokens=1)
    assert isinstance(error, NothingLearned)
    # Nothing is thrown away, and the run ends after far fewer prompts than 512.
    assert len({record["group_id"] for record in run.rollouts}) <= 2 * SIGNAL_PATIENCE + 3
    assert all(record["step"] == 1 and record["reward"] == 0 for record in run.rollouts)
    assert {(record["step"], record["split"], record["rollout_id"]) for record in run.rollouts} == set(run.rows)
    assert run.metrics[0]["step"] == 1 and run.metrics[0]["groups_all_equal"] == 1
    assert names(run)["no_signal"]["verdict"] == "broken" and names(run)["no_signal"]["rollouts"]
    # It is shown after the first batch, with three answers, their rewards and the likely cause.
    first = printed.split("step 1 has nothing to learn from")[0]
    assert "broken" not in first.split("reward 0.00")[0]  # a healthy run of a hard task may begin so
    assert first.count("reward 0.00") == 3 and "all rewards are 0" in first and "Likely: " in first
    shown = CliRunner().invoke(app, ["view", "--terminal", str(tmp_path / "run")])
    assert shown.exit_code == 0 and "reward 0.00" in shown.output


def test_a_reward_that_fails_says_where(ended, takes_long):
    run, printed, error = ended(raises)
    assert isinstance(error, CollectionStalled) and names(run)["unscored"]["verdict"] == "broken"
    assert printed.count("not scored") == 3 and len(run.rollouts) <= 24 * 4
    assert "no such column" in run.rollouts[0]["error"] and "no such column" in printed


def test_a_later_step_without_signal_is_recorded_too(ended, takes_long):
    num_asked = []

    def until_the_second_step(completion):
        num_asked.append(completion)
        return differs(completion) if len(num_asked) <= 12 else 0.5

    run, printed, error = ended(until_the_second_step, num_steps=3)
    assert error is None and "nothing was left to learn from at step" in printed
    assert "engine and trainer load" in printed.split("step 1 of 3 begins")[0]
    last = max(record["step"] for record in run.rollouts)
    assert last > 1 and names(run, last)["no_signal"]["verdict"] == "broken"
    assert "policy_version" not in run.metrics[-1]  # of the step that was not made


def test_a_task_that_is_learned_ends_the_run_and_says_so(ended, takes_long):
    num_asked = []

    def right_from_the_second_step(completion):
        num_asked.append(completion)
        return differs(completion) if len(num_asked) <= 12 else 1.0

    run, printed, error = ended(right_from_the_second_step, num_steps=9)
    assert error is None and "the task is learned: at step 2 every answer is right" in printed
    assert "nothing" not in printed and "no_signal" not in printed
    assert names(run, 2)["learned"]["verdict"] == "fine"
    assert len({record["group_id"] for record in run.rollouts if record["step"] == 2}) == 6  # two batches


def test_dropped_rollouts_keep_their_tokens(ended, takes_long):
    def dull(completion, place):
        return differs(completion) if place == 0 else 0.5

    run, _, _ = ended(dull, num_steps=1)
    keys = {(record["step"], record["split"], record["rollout_id"]) for record in run.rollouts}
    assert len(keys) >= 12 and keys == set(run.rows)
    advantages = [row.advantage for rows in run.rows.values() for row in rows]
    assert any(value == value for value in advantages) and any(value != value for value in advantages)
