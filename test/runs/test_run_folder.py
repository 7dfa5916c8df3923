"""What a run leaves behind survives a kill at any moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sqlite3
import sys
from pathlib import Path

import pytest
import torch
from own_packages import with_packages_of_its_own
from rich.console import Console
from waiting import wait_until

from llmrl._utils.files import write_atomically
from llmrl.cli.evaluate import options_of
from llmrl.config.sections import EnvConfig, RunConfig
from llmrl.data import Rollout, RolloutStatus
from llmrl.runs.report import print_next_steps, resume_command
from llmrl.runs.run_folder import BackgroundWrites, RunFolder
from llmrl.scripts import grpo, sft
from llmrl.watch import tracking
from llmrl.watch.tracking import spread
from llmrl.weight_sync.double_buffer import FILE_NAME, DoubleBuffer


def test_a_folder_with_a_run_is_only_reopened_to_resume(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run to resume"):
        RunFolder(tmp_path / "run", resume=True)
    RunFolder(tmp_path / "run").close()  # ended before anything was recorded
    folder = RunFolder(tmp_path / "run")
    folder.log_rollouts(0, "test", [{"reward": 1.0}])
    folder.close()
    with pytest.raises(FileExistsError, match="resume=true"):
        RunFolder(tmp_path / "run")
    RunFolder(tmp_path / "run", resume=True)


def test_a_batch_that_is_set_aside_takes_no_others_name_and_the_last_one_is_found(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for number in range(12):
        folder.save_batch(3, {"number": number})
        if number == 11:  # one was moved back
            (tmp_path / "run/set-aside/000003-1.safetensors").unlink()
        for _ in range(2):
            said = folder.fail_replay(3, ValueError("no update"))
        assert f"000003-{number + 1}.safetensors" in said
        assert folder.load_set_aside(3)["number"] == number
    assert len(list((tmp_path / "run/set-aside").glob("*.safetensors"))) == 11


@pytest.mark.parametrize(
    ("script", "command"),
    [
        (grpo.__file__, "llmrl train"),  # which becomes that script
        (sft.__file__, "python -m llmrl.scripts.sft"),
        ("mine/grpo.py", "python mine/grpo.py"),
    ],
)
def test_a_run_is_continued_by_the_command_that_started_it(monkeypatch, script, command):
    monkeypatch.setattr(sys, "argv", [script, "run.path=runs/mine"])
    assert resume_command("runs/mine", {"seed": 1}) == f"{command} run.path=runs/mine resume=true seed=1"


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half(temporary):
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_text() == "old"


def test_content_is_on_the_disk_before_the_name_that_leads_to_it(tmp_path, monkeypatch):
    """After a power cut a file that was renamed and not synced is there, and empty."""
    events = []
    fsync, replace = os.fsync, Path.replace

    def recorded_fsync(descriptor):
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        fsync(descriptor)

    def recorded_replace(path, target):
        events.append(("rename", path.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "replace", recorded_replace)

    def orders_of(action, folder):
        events.clear()
        action()
        renamed = [name for kind, name in events if kind == "rename"]
        assert renamed
        for name in renamed:
            at = events.index(("rename", name))
            assert ("sync", name) in events[:at] and ("sync", folder) in events[at:]
        return list(events)

    folder = RunFolder(tmp_path / "run", trackers=[])
    orders_of(lambda: folder.save_batch(1, {"batch": [1]}), "batches")
    orders_of(lambda: folder.save_checkpoint({"step": 1}), "run")
    orders_of(lambda: folder.write_summary({}), "run")
    orders_of(lambda: folder.log_metrics(1, {"a": 1.0}), "run")
    buffer = DoubleBuffer(tmp_path / "weights")
    written = orders_of(lambda: buffer.write({"weight": torch.ones(3)}), "weights")
    assert written.index(("sync", FILE_NAME)) < written.index(("rename", "current.json.part"))


def test_checkpoints_keep_the_batches_since(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for step in (1, 2, 3):
        folder.save_batch(step, {"batch": torch.tensor([step]), "position": step})
    folder.save_checkpoint({"step": 2, "weights": torch.ones(3)})
    assert folder.load_checkpoint()["step"] == 2
    assert folder.load_batch(3)["position"] == 3
    assert folder.load_batch(1) is None and folder.load_batch(4) is None


def test_metrics_of_a_repeated_step_count_once(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for step, reward in ((1, 0.1), (2, 0.2), (2, 0.3)):
        folder.log_metrics(step, {"reward_mean": reward})
    assert [(row["step"], row["reward_mean"]) for row in folder.read_metrics()] == [(1, 0.1), (2, 0.3)]
    folder.close()


def test_a_metric_that_some_steps_lack_keeps_its_column(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for step, metrics in enumerate(({"a": 1.0}, {"a": 2.0, "b": 3.0}, {"b": 4.0}), start=1):
        folder.log_metrics(step, metrics)
    assert folder.read_metrics() == [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 3}, {"step": 3, "b": 4}]
    folder.close()


# Trackers


TRACE = Rollout(
    rollout_id="train/0/0",
    group_id="train/0",
    sample_index=0,
    group_size=2,
    status=RolloutStatus.COMPLETED,
    reward=0.5,
    messages=(
        {"role": "user", "content": "Höhe?\n*now*"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 7}}}]},
        {"role": "tool", "content": [{"type": "text", "text": "8848"}]},
    ),
).to_record()
READ = 'user: Höhe?\n*now*\n\nassistant: \n{"name": "look", "arguments": {"at": 7}}\n\ntool: 8848'


def log_and_resume(path, tracker):
    """Two steps, and after a restart two more, each with a conversation."""
    for is_resumed, steps in ((False, (1, 2)), (True, (3, 4))):
        folder = RunFolder(path, resume=is_resumed, trackers=[tracker])
        for step in steps:
            metrics = {"reward_mean": step / 7, "ESS": 1.0, "kl_approx": float("nan"), "eval/a/pass@1": 0.25}
            folder.log_metrics(step, metrics, [{**TRACE, "num_turns": step}])
        folder.close()
    assert [row["step"] for row in folder.read_metrics()] == [1, 2, 3, 4]  # whatever else is asked for


def test_a_tracker_is_refused_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for names, error, words in (
        (["tensorbord"], ValueError, "Did you mean 'tensorboard'"),
        (["csv"], ValueError, "metrics.csv is always written"),
        ("wandb", TypeError, r"write \['wandb'\]"),
        (["tensorboard", "tensorboard"], ValueError, "names one twice"),
        (["tensorboard", "wandb"], ImportError, r"pip install 'llmrl\[tracking\]'"),
    ):
        with pytest.raises(error, match=words):
            RunFolder(tmp_path / "run", trackers=names)
    RunFolder(tmp_path / "run", trackers=[])  # and would be refused if the folder held one


@pytest.mark.parametrize("failing", ["opened", "closed"])
def test_a_tracker_that_fails_leaves_no_other_open(tmp_path, monkeypatch, failing):
    closed = []

    class Failing(tracking.CSVTracker):
        def __init__(self, path):
            super().__init__(path / "other.csv")
            if failing == "opened":
                raise OSError("no place")

        def close(self):
            raise OSError("no place")

    class Sound(tracking.CSVTracker):
        def close(self):
            closed.append(self)

    monkeypatch.setitem(tracking._OPENERS, "wandb", Failing)
    for name in ("tensorboard", "mlflow"):
        monkeypatch.setitem(tracking._OPENERS, name, Sound)
    monkeypatch.setattr(tracking, "require", lambda *_, **__: None)
    with pytest.raises(OSError, match="no place"):
        RunFolder(tmp_path / "run", trackers=["tensorboard", "wandb", "mlflow"]).close()
    assert len(closed) == (1 if failing == "opened" else 2)
    RunFolder(tmp_path / "run").close()  # it is not locked


def test_tensorboard_has_every_step_of_a_resumed_run(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read in the order of their numbers as text, in which the tenth stands before the ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    log_and_resume(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/reward_mean")] == [
        (step, pytest.approx(step / 7)) for step in (1, 2, 3, 4)
    ]
    [*_, text] = events.Tensors("traces/0/text_summary")
    assert text.step == 4 and text.tensor_proto.string_val[0].decode().startswith("    user: Höhe?\n    *now*\n")


def test_wandb_continues_a_resumed_run(tmp_path, monkeypatch, own_programs):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_and_resume(tmp_path / "run", "wandb")
    run_id = (tmp_path / "run" / "run_id").read_text()
    [file, resumed] = sorted((tmp_path / "run").glob(f"wandb/offline-run-*-{run_id}*/run-{run_id}.wandb"))
    for path, step in ((file, 2), (resumed, 4)):  # records of protobuf, in which numbers are text
        # Its own process writes the file, and has been seen to do so after it called the run finished.
        words = (b"reward_mean", str(step / 7).encode(), b"llmrl")
        wait_until(lambda path=path, words=words: all(word in path.read_bytes() for word in words))
    assert str(2 / 7).encode() not in resumed.read_bytes()
    tables = [
        json.loads(path.read_text()) for path in tmp_path.glob("run/wandb/offline-*/files/media/table/train/*.json")
    ]
    shown = sorted((dict(zip(table["columns"], table["data"][0], strict=True)) for table in tables), key=str)
    assert [(row["step"], row["num_turns"], row["conversation"]) for row in shown] == [
        (step, step, READ) for step in (1, 2, 3, 4)
    ]


def test_trackio_continues_a_resumed_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "database"))
    trackio = pytest.importorskip("trackio")
    assert Path(trackio.utils.TRACKIO_DIR) == tmp_path / "database"
    log_and_resume(tmp_path / "run", "trackio")
    assert trackio.context_vars.current_run.get() is None  # all is written, nothing waits for the process to end
    with sqlite3.connect(tmp_path / "database" / "llmrl.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1 and rows[0][0].startswith("run-")
    logged = [
        (step, json.loads(metrics)["train/reward_mean"]) for _, step, metrics in rows if b"reward_mean" in metrics
    ]
    assert logged == [(step, pytest.approx(step / 7)) for step in (1, 2, 3, 4)]
    with sqlite3.connect(tmp_path / "database" / "llmrl.db") as database:
        shown = database.execute("select step, messages, metadata from traces order by step").fetchall()
    assert [step for step, _, _ in shown] == [1, 2, 3, 4]
    assert json.loads(shown[3][1]) == TRACE["messages"] and json.loads(shown[3][2])["num_turns"] == 4


@with_packages_of_its_own("mlflow", "mlflow>=3.17,<3.18")
def test_mlflow_continues_a_resumed_run(tmp_path, monkeypatch):
    import mlflow

    monkeypatch.chdir(tmp_path)
    log_and_resume(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/run/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("llmrl").experiment_id])
    logged = client.get_metric_history(run.info.run_id, "train/reward_mean")
    assert [(metric.step, metric.value) for metric in logged] == [(step, step / 7) for step in (1, 2, 3, 4)]
    assert run.data.metrics["eval/a/pass_1"] == 0.25 and run.info.status == "FINISHED"
    traces = tmp_path / "run" / "mlflow" / run.info.run_id / "artifacts" / "traces"
    tables = [json.loads((traces / f"00000{step}.json").read_text()) for step in (1, 4)]
    assert [(table["num_turns"], table["conversation"]) for table in tables] == [([1], [READ]), ([4], [READ])]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]  # nothing beside the folder
    for error, status in ((ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")):
        folder = RunFolder(tmp_path / "run", resume=True, trackers=["mlflow"])
        with pytest.raises(error), contextlib.closing(folder):
            raise error
        assert client.get_run(run.info.run_id).info.status == status


def test_traces_are_spread_and_need_a_tracker():
    records = [{"group": index // 4} for index in range(16)]
    assert [record["group"] for record in spread(records, 4)] == [0, 1, 2, 3] and spread(records, 0) == []
    assert spread(records, 20) == records and spread([], 3) == []
    for traces, trackers in ((8, []), (-1, ["tensorboard"])):
        with pytest.raises(ValueError, match=r"run\.traces(=8 needs run\.trackers| must be at least 0, got -1)"):
            RunConfig(path="run", trackers=trackers, traces=traces)


def test_how_to_go_on_names_the_environment_that_is_not_active(tmp_path, monkeypatch):
    if sys.prefix == sys.base_prefix:
        pytest.skip("this Python is in no virtual environment")
    monkeypatch.chdir(tmp_path)
    said = []
    for path in ("/usr/bin", f"{sys.prefix}/bin:/usr/bin"):
        monkeypatch.setenv("PATH", path)
        console = Console(file=io.StringIO(), width=200)
        print_next_steps(console, RunFolder(tmp_path / path.replace("/", "_"), trackers=[]), "python script.py",
                         EnvConfig(name="addition", options={"num_digits": 1}))  # fmt: skip
        said.append(console.file.getvalue())
    assert f". {sys.prefix}/bin/activate" in said[0] and "activate" not in said[1]
    assert all("llmrl view" in text and "python script.py" in text for text in said)
    assert all("--env addition num_digits=1\n" in text for text in said)


def test_the_command_to_measure_evaluates_the_problems_of_the_run(tmp_path):
    env = EnvConfig(name="addition", data="my sums.jsonl", eval_split="held out")
    env.options = {"prompt": "yes", "num_digits": 2, "seed": None, "scale": 1e-7, "sizes": [1, {"a": "it's"}]}
    console = Console(file=io.StringIO(), width=500)
    folder = RunFolder(tmp_path / "run", trackers=[])
    print_next_steps(console, folder, "python script.py", env)
    [line] = [line for line in console.file.getvalue().splitlines() if line.startswith("measure it")]
    words = shlex.split(line.removeprefix("measure it"))
    model, options = ["--model", str(tmp_path / "run")], words[10:]
    asked = ["--data", "my sums.jsonl", "--split", "held out", "--env", "addition"]
    assert words[:10] == ["llmrl", "eval", *model, *asked] and options_of(options) == env.options
    env.data = [{"query": "1 + 1 ="}]  # not on a command line
    print_next_steps(Console(file=(text := io.StringIO())), folder, "python script.py", env)
    assert "measure it" not in text.getvalue() and "talk to it" in text.getvalue()


# Rollouts


def test_rollouts_are_json_lines(tmp_path):
    folder = RunFolder(tmp_path / "run")
    rollout = Rollout(rollout_id="r", group_id="g", sample_index=0, group_size=1, status=RolloutStatus.ERROR)
    rollout.messages = ({"role": "user", "content": "é\n"},)
    folder.log_rollouts(3, "train", [rollout.to_record()] * 2)
    records = [json.loads(line) for line in folder.rollouts_path.read_text().splitlines()]
    assert len(records) == 2
    assert records[0]["step"] == 3 and records[0]["status"] == "error"
    assert records[0]["messages"] == [{"role": "user", "content": "é\n"}]


def test_background_writes_raise_when_waited_for():
    writes = BackgroundWrites()
    writes.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writes.wait()
    writes.wait()
