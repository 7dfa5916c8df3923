"""What a loop knew before it was killed (the best, the end, where it was) it knows when it is resumed."""

from __future__ import annotations

import json
import shutil
import signal
import time
from types import SimpleNamespace

import killed_runs
import pytest
import torch
from killed_runs import train

from llmrl._utils.files import write_folder_atomically
from llmrl.config.sections import EvalConfig, ExportConfig
from llmrl.runs.run import Run
from llmrl.runs.run_folder import RunFolder
from llmrl.runs.tracked import check_free_space, split_tracked
from llmrl.trainer import make_optimizer


class Killed(Exception):
    pass


def killed_at(last):
    """Ends a run in the midst of a step, as a kill does: the step's batch is saved, and nothing of it is learned."""

    def on_step(step, batch):
        if step == last:
            raise Killed

    return on_step


def best_of(path):
    return json.loads((path / "model-best/weights.json").read_text())


def rows_of(path):
    return RunFolder(path, read_only=True).read_metrics()


def records_of(path):
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text().splitlines()]


def steps_of(path):
    return sorted(int(row["step"]) for row in rows_of(path))


SCORES = {0: 0.1, 1: 1 / 3, 2: 0.2, 3: 0.3, 4: 1 / 3, 5: 0.31}
BY_SCORE = EvalConfig(every=1, metric="eval/score")


@pytest.mark.slow
@pytest.mark.parametrize("killed", range(2, 6))
def test_the_best_model_is_no_worse_one_after_a_kill(renderer, tmp_path, killed):
    options = {"evaluation": BY_SCORE, "score": SCORES.__getitem__}
    with pytest.raises(Killed):
        train(tmp_path / "run", renderer, resume=False, on_step=killed_at(killed), **options)
    first = best_of(tmp_path / "run")
    train(tmp_path / "run", renderer, resume=True, **options)
    assert best_of(tmp_path / "run") == first  # of step 1; that of step 4, a third too, is not better


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no evaluation until step")
def test_a_metric_that_the_first_evaluations_lack_chooses_among_the_others(renderer, tmp_path):
    evaluation = EvalConfig(every=1, metric="eval/score", patience=2)
    why = "eval/score was best at step 2, and eval.patience has run out"
    options = {"evaluation": evaluation, "score": {2: 0.5, 3: 0.1}.get}
    assert train(tmp_path / "whole", renderer, resume=False, **options) == why
    assert steps_of(tmp_path / "whole") == [0, 1, 2, 3, 4]
    with pytest.raises(Killed):
        train(tmp_path / "killed", renderer, resume=False, on_step=killed_at(2), **options)
    assert train(tmp_path / "killed", renderer, resume=True, **options) == why
    assert best_of(tmp_path / "killed") == best_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("killed", range(2, 5))
def test_patience_goes_on_where_it_was(renderer, tmp_path, killed):
    evaluation = EvalConfig(every=1, metric="eval/score", patience=3)
    options = {"evaluation": evaluation, "score": SCORES.__getitem__}
    with pytest.raises(Killed):
        train(tmp_path, renderer, resume=False, on_step=killed_at(killed), **options)
    why = "eval/score was best at step 1, and eval.patience has run out"
    for _ in range(2):  # an ended run stays ended
        assert train(tmp_path, renderer, resume=True, **options) == why
        assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    # With more patience it goes on.
    options["evaluation"] = EvalConfig(every=1, metric="eval/score", patience=9)
    assert train(tmp_path, renderer, resume=True, **options) == "all 5 steps are done"


@pytest.mark.slow
def test_a_run_that_has_reached_its_target_is_not_trained_further(renderer, tmp_path):
    train(tmp_path / "whole", renderer, resume=False)
    rewards = {int(row["step"]): row.get("reward_mean", 0.0) for row in rows_of(tmp_path / "whole")}
    reached = min(step for step in rewards if rewards[step] >= sorted(rewards.values())[-2])
    assert 0 < reached < 5
    for name, killed in (("ended", None), ("killed", reached)):
        path, options = tmp_path / name, {"target_reward": rewards[reached]}
        if killed is None:
            train(path, renderer, resume=False, **options)
        else:
            with pytest.raises(Killed):
                train(path, renderer, resume=False, on_step=killed_at(killed), **options)
        assert f"at step {reached}" in train(path, renderer, resume=True, **options)
        assert steps_of(path) == list(range(reached + 1))
    options = {"target_reward": 2.0}  # a higher one is trained for
    assert train(path, renderer, resume=True, **options) == "all 5 steps are done"


@pytest.mark.slow
def test_without_its_checkpoint_a_run_is_not_resumed_from_the_first_model(renderer, tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, renderer, resume=False, on_step=killed_at(4))
    checkpoint = tmp_path / "checkpoint.safetensors"
    checkpoint.rename(tmp_path / "copy")
    before = sorted(path.name for path in tmp_path.rglob("*"))
    for batches in (2, 1, 0):  # that are left
        with pytest.raises(ValueError, match=r"checkpoint\.safetensors is missing.*put a copy of it in its place"):
            train(tmp_path, renderer, resume=True)
        if batches == 2:
            assert sorted(path.name for path in tmp_path.rglob("*")) == before
        if batches:
            max(tmp_path.glob("batches/*.safetensors")).unlink()
    (tmp_path / "copy").rename(checkpoint)
    assert train(tmp_path, renderer, resume=True) == "all 5 steps are done"
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_old_checkpoint_goes_on_only_without_the_batches_of_later_weights(renderer, tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, renderer, resume=False, on_step=killed_at(4))
    old = (tmp_path / "checkpoint.safetensors").read_bytes()  # of step 2
    train(tmp_path, renderer, resume=True)
    (tmp_path / "checkpoint.safetensors").write_bytes(old)
    assert {path.stem for path in tmp_path.glob("batches/*")} == {"000004", "000005"}
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors is from step 2.*step 3 is missing.*step 4"):
        train(tmp_path, renderer, resume=True)
    for path in tmp_path.glob("batches/*"):
        path.unlink()
    evaluation = EvalConfig(every=1, metric="eval/score", patience=9)
    scores = {2: 0.2, 3: 0.5, 4: 0.6, 5: 0.7}
    options = {"evaluation": evaluation, "score": lambda step: scores.get(step, 0.0)}
    assert train(tmp_path, renderer, resume=True, **options) == "all 5 steps are done"
    assert [row.get("eval/score", 0.0) for row in rows_of(tmp_path)][3:] == [0.5, 0.6, 0.7]
    assert best_of(tmp_path) == json.loads((tmp_path / "weights.json").read_text())["weights"]


@pytest.mark.slow
def test_batches_drawn_after_one_that_was_set_aside_are_not_trained_on(renderer, tmp_path):
    with pytest.raises(Killed):
        train(tmp_path, renderer, resume=False, on_step=killed_at(4))  # batches of steps 3 and 4 are there

    def fail(step, batch):
        if step == 3 and not (tmp_path / "set-aside").exists():
            raise ValueError("no update is made of this")

    stale = (tmp_path / "batches/000004.safetensors").read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match="no update"):
            train(tmp_path, renderer, resume=True, on_step=fail)
    with pytest.raises(Killed):
        train(tmp_path, renderer, resume=True, on_step=killed_at(3))
    train(tmp_path, renderer, resume=True)
    assert (tmp_path / "batches/000004.safetensors").read_bytes() != stale
    ids = [record["rollout_id"] for record in records_of(tmp_path) if record["split"] == "train"]
    assert len(ids) == len(set(ids))


def test_a_run_without_room_for_its_checkpoints_is_refused_before_it_begins(renderer, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(OSError, match=r"checkpoints need .* GiB more.*another disk with run\.path"):
            train(tmp_path, renderer, resume=False)
    assert not list(tmp_path.glob("batches/*"))
    assert train(tmp_path, renderer, resume=False) == "all 5 steps are done"  # the same call, when there is room


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_room_for_checkpoints_is_that_of_their_files(tmp_path, monkeypatch, is_tied):
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300))
    if is_tied:
        model[1].weight = model[0].weight
    optimizer, _ = make_optimizer(model, learning_rate=0.1)
    tracked = {"model": model, "optimizer": optimizer}
    path = tmp_path / "checkpoint.safetensors"

    def num_needed(coming):
        """Find the least number of free bytes that is enough."""
        enough, too_few = 1 << 30, -1
        while enough - too_few > 1:
            free = (enough + too_few) // 2
            monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
            try:
                check_free_space(tracked, path, num_checkpoints=coming)
                enough = free
            except OSError:
                too_few = free
        return enough

    needed = [num_needed(coming) for coming in range(4)]
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    folder = RunFolder(tmp_path)
    folder.save_checkpoint(split_tracked(tracked, tmp_path, 1)[0] | {"step": 1})
    folder.close()
    size = path.stat().st_size
    # Never more than the file, or a run that has room is refused.
    assert needed == [0, pytest.approx(size, rel=0.01), needed[1] * 2, needed[1] * 2] and needed[1] < size
    assert [num_needed(coming) for coming in range(4)] == [0, needed[1], needed[1], needed[1]]


def test_an_optimizer_without_moments_needs_no_room_for_them(tmp_path, monkeypatch):
    model = torch.nn.Linear(300, 300)
    tracked = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 300 * 301))
    check_free_space(tracked, tmp_path / "checkpoint.safetensors", num_checkpoints=1)


def test_an_interrupted_replay_ends_after_its_step_and_is_repeated_by_the_next_resumption(
    renderer, tmp_path, monkeypatch
):
    path, steps = tmp_path / "run", []

    def interrupt(step, batch):
        steps.append(step)
        if step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "is_due", staticmethod(lambda step, every: False))  # no checkpoint: all batches are kept
    train(path, renderer, resume=False)
    weights = (path / "weights.json").read_text()
    assert train(path, renderer, resume=True, on_step=interrupt).startswith("interrupted")
    assert steps == [1, 2] and not (path / "set-aside").exists()
    train(path, renderer, resume=True)
    assert (path / "weights.json").read_text() == weights


@pytest.mark.slow
def test_an_export_is_awaited_although_the_wait_for_the_checkpoint_is_interrupted(renderer, tmp_path, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt  # where the run waits

    def write_late(path, write):
        path.parent.mkdir(exist_ok=True)
        time.sleep(0.5)
        write_folder_atomically(path, write)

    def fail(folder, step, collected):
        if step == 3:
            raise ValueError("no room")
        save_batch(folder, step, collected)

    save_batch = RunFolder.save_batch
    monkeypatch.setattr(RunFolder, "save_checkpoint", interrupt)
    monkeypatch.setattr(RunFolder, "save_batch", fail)
    monkeypatch.setattr(killed_runs, "write_folder_atomically", write_late)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, renderer, resume=False, export=ExportConfig(every=2))
    assert (tmp_path / "exports/step-000002/weights.json").exists()
