"""What models write, kills, torn files, flipped bits and sent folders do to a run: it goes on, or says what to do."""

from __future__ import annotations

import functools
import io
import json
import math
import os
import pickle
import random
import shutil
import signal
import stat
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from killed_runs import SUMS, train
from omegaconf import OmegaConf
from rich.console import Console
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from transformers import AutoTokenizer

from llmrl.config.resumed import resumed_config
from llmrl.data import History, Rollout, RolloutStatus, Tokens
from llmrl.data.state_file import DamagedFileError, load_state, save_state
from llmrl.envs.sampler import PromptSampler
from llmrl.rendering import TemplateRenderer
from llmrl.runs import run_folder
from llmrl.runs.evaluation import BestEvaluation
from llmrl.runs.folder_lock import FolderInUseError
from llmrl.runs.report import plot_curve
from llmrl.runs.run_folder import RunFolder, random_states
from llmrl.viewer import print_run, read_run, write_page
from llmrl.watch.live_view import LiveView
from llmrl.weight_sync.double_buffer import DoubleBuffer

SURROGATE = '<tool_call>\n{"name": "look", "arguments": {"q": "\\ud800"}}\n</tool_call><|im_end|>'


def lines_of(path):
    return [json.loads(line) for line in (path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()]


# What a model writes


@pytest.mark.slow
def test_a_lone_surrogate_in_a_tool_call_ends_no_run(tokenizer, tmp_path):
    renderer = TemplateRenderer(tokenizer, tool_parser="hermes")
    train(tmp_path / "run", renderer, resume=False, answers=("", SURROGATE))
    train(tmp_path / "run", renderer, resume=True, answers=("", SURROGATE))
    calls = [message.get("tool_calls") for line in lines_of(tmp_path / "run") for message in line["messages"]]
    found = [call[0]["function"]["arguments"] for call in calls if call]
    assert found and all(arguments == {"q": "?"} for arguments in found)
    run = read_run(tmp_path / "run")
    assert write_page([run], tmp_path / "page.html").exists()
    strict = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_run(run, console=Console(file=strict))
    with LiveView(1, console=Console(file=strict)) as view:
        for record in run.rollouts:
            view.show_sample(record)


class Raises:
    def __str__(self):
        raise RuntimeError("no text")


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [nested(50), nested(950), 10**5000, {(1, 2): float("nan")}, Raises(), {"a": b"\xff"}, "\udcff\0\r\n"],
    ids=["nested", "nested deep", "long integer", "tuple as key", "no text", "bytes", "control characters"],
)
def test_whatever_is_in_a_rollout_its_record_is_one_line_of_json(value, tmp_path):
    rollout = Rollout(rollout_id="r", group_id="g", sample_index=0, group_size=1, status=RolloutStatus.COMPLETED)
    call = {"type": "function", "function": {"name": "f", "arguments": {"value": value}}}
    rollout.messages = ({"role": "assistant", "content": "", "tool_calls": [call]},)
    rollout.info, rollout.reward = {"value": value}, float("inf")
    folder = RunFolder(tmp_path / "run", trackers=())
    folder.log_rollouts(1, "train", [rollout.to_record(), rollout.to_record()])
    first, second = lines_of(tmp_path / "run")
    assert repr(first) == repr(second) and first["messages"][0]["tool_calls"][0]["function"]["name"] == "f"
    assert write_page([read_run(tmp_path / "run")], tmp_path / "page.html").exists()


def test_metrics_that_are_not_finite_are_left_out_and_those_of_other_writers_are_shown(tmp_path):
    folder = RunFolder(tmp_path / "run")
    view = LiveView(4, console=Console(file=io.StringIO(), force_terminal=True))
    with view:
        for step, value in enumerate((0.5, math.nan, math.inf, -math.inf), start=1):
            metrics = {"reward_mean": value, "log_prob_difference_mean": value, "generate_seconds": value}
            folder.log_metrics(step, metrics)
            view.show_step(step, metrics)
    folder.close()
    rows = folder.read_metrics()
    assert [row["reward_mean"] for row in rows if "reward_mean" in row] == [0.5]
    with folder.metrics_path.open("a") as file:
        file.writelines(
            f"{step},{value},{value},{value}\n" for step, value in enumerate(("nan", "inf", "-inf"), start=2)
        )
    rows = RunFolder(tmp_path / "run", read_only=True).read_metrics()
    assert [repr(row["reward_mean"]) for row in rows] == ["0.5", "nan", "inf", "-inf"]
    plot_curve(rows, tmp_path / "curve.png")
    print_run(read_run(tmp_path / "run"), console=Console(file=io.StringIO()))
    assert write_page([read_run(tmp_path / "run")], tmp_path / "page.html").exists()


def test_an_evaluation_that_is_not_a_number_is_never_the_best():
    best = BestEvaluation("accuracy", patience=2)
    values = (math.nan, 0.1, math.nan, 0.2)
    assert [best.see(step, {"accuracy": value}) for step, value in enumerate(values)] == [True, True, False, True]


# A batch that cannot be trained on


def test_a_batch_that_fails_twice_when_it_is_replayed_is_set_aside_and_the_run_goes_on(renderer, tmp_path):
    path, failing = tmp_path / "run", []

    def fail(step, batch):
        ids = list(batch["rollout", "rollout_id"])
        if step == 3 and failing in ([], ids):
            failing[:] = ids
            raise ValueError("no update is made of this \ud800")

    for num_failures in range(3):
        assert not (path / "set-aside").exists()
        with pytest.raises(ValueError, match="no update"):
            train(path, renderer, resume=num_failures > 0, on_step=fail)
    train(path, renderer, resume=True, on_step=fail)
    (kept,) = (path / "set-aside").glob("*.safetensors")
    assert kept.with_suffix(".failed").read_text().count("Traceback") == 2
    assert list(load_state(kept, advice="")["batch"]["rollout", "rollout_id"]) == failing
    played = [line["rollout_id"] for line in lines_of(path) if line["split"] == "train"]
    assert len(set(played)) == len(played) == 5 * 6 and not set(failing) & set(played)
    assert [row["step"] for row in RunFolder(path, read_only=True).read_metrics()] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_run_that_fails_leaves_its_folder_when_its_checkpoint_is_written(renderer, tmp_path, monkeypatch):
    save, save_batch = RunFolder.save_checkpoint, RunFolder.save_batch

    def save_late(*arguments, **options):
        time.sleep(0.5)
        save(*arguments, **options)

    def fail(folder, step, collected):
        if step == 3:
            raise ValueError("no room")
        save_batch(folder, step, collected)

    monkeypatch.setattr(RunFolder, "save_checkpoint", save_late)
    monkeypatch.setattr(RunFolder, "save_batch", fail)
    with pytest.raises(ValueError, match="no room"):
        train(tmp_path / "run", renderer, resume=False)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert "checkpoint.safetensors" in files and not any(name.startswith(".checkpoint") for name in files)


@pytest.mark.slow
@pytest.mark.parametrize("is_short", [True, False], ids=["of memory", "of nothing"])
def test_a_batch_whose_replay_the_kernel_ends_for_want_of_memory_is_set_aside(
    renderer, tmp_path, monkeypatch, is_short
):
    path, num_kills = tmp_path / "run", tmp_path / "kills"
    num_kills.write_text("0")
    monkeypatch.setattr(run_folder, "memory_kills", lambda: ("this start", int(num_kills.read_text())))

    def fail(step, batch):
        if step == 3 and not (path / "set-aside").exists():
            if is_short:
                num_kills.write_text(str(int(num_kills.read_text()) + 1))
            os.kill(os.getpid(), signal.SIGKILL)

    def forked(**arguments):
        if (pid := os.fork()) == 0:
            try:
                train(path, renderer, **arguments)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL

    for num_started in range(4 if not is_short else 3):  # as it is collected, and as it is replayed
        assert not (path / "set-aside").exists()
        forked(resume=num_started > 0, on_step=fail)
    if is_short:
        train(path, renderer, resume=True, on_step=fail)
        (kept,) = (path / "set-aside").glob("*.safetensors")
        assert kept.with_suffix(".failed").read_text() == "The kernel ended the process because memory ran out.\n" * 2
    else:
        train(path, renderer, resume=True)
        assert not (path / "set-aside").exists() and not list(path.glob("batches/*.failed"))
    assert [row["step"] for row in RunFolder(path, read_only=True).read_metrics()] == [0, 1, 2, 3, 4, 5]
    assert not (path / "batches/replaying.json").exists()


@pytest.mark.slow
def test_what_fails_beside_the_batch_sets_none_aside(renderer, tmp_path):
    def fail(step, batch):
        if step == 3:
            raise OSError("no space left on the disk")

    for resume in (False, True, True, True):
        with pytest.raises(OSError, match="no space"):
            train(tmp_path / "run", renderer, resume=resume, on_step=fail)
    assert not (tmp_path / "run" / "set-aside").exists()
    train(tmp_path / "run", renderer, resume=True)


# Two runs


def waiting_child(action):
    """A process that does something and then waits for its end; its id, once it is done."""
    done, doing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            kept = action()
            os.write(doing, b"1" if kept is not None else b"0")
            signal.pause()
        finally:
            os._exit(1)
    os.close(doing)
    assert os.read(done, 1) == b"1"
    os.close(done)
    return pid


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_folder_is_one_runs_until_its_process_ends(tmp_path):
    path = tmp_path / "run"
    pid = waiting_child(lambda: RunFolder(path, trackers=()))
    (path / "metrics.csv").write_text("step,a\r\n1,2\r\n")
    for resume in (False, True):
        with pytest.raises(FolderInUseError, match=rf"process {pid} on {os.uname().nodename} since"):
            RunFolder(path, resume=resume, trackers=())
    assert read_run(path).metrics == [{"step": 1, "a": 2}]
    end(pid)
    folder = RunFolder(path, resume=True, trackers=())
    child = waiting_child(lambda: 1)  # has a copy of every open file
    with pytest.raises(FolderInUseError, match=f"process {os.getpid()} .* close the Run"):
        RunFolder(path, resume=True, trackers=())
    folder.close()
    RunFolder(path, resume=True, trackers=()).close()
    end(child)


# Half of a file


@pytest.fixture(scope="module")
def run_path(renderer, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    train(path, renderer, resume=False)
    return path


def test_wherever_a_row_of_the_table_is_cut_the_rows_before_it_count(tmp_path):
    path = tmp_path / "run"
    rows = [{"step": step, "a": step / 8, "b": step * 1000} for step in (1, 2, 3)]
    lines = ["step,a,b\r\n", *(f"{row['step']},{row['a']},{row['b']}\r\n" for row in rows)]
    path.mkdir()
    for length in range(len(lines[-1])):
        (path / "metrics.csv").write_bytes("".join([*lines[:-1], lines[-1][:length]]).encode())
        assert RunFolder(path, read_only=True).read_metrics() == rows[:2]
        folder = RunFolder(path, resume=True, trackers=())
        folder.log_metrics(9, {"a": 1.0})
        assert folder.read_metrics() == [*rows[:2], {"step": 9, "a": 1}]
        folder.close()
    (path / "metrics.csv").write_bytes("".join([*lines[:2], "2,0.x,2000\r\n", "\0\0\0\r\n", lines[3]]).encode())
    assert RunFolder(path, read_only=True).read_metrics() == [rows[0], rows[2]]
    for garbage in (b"a,b\r\n1,2\r\n", b"st\rep,a\r\n1,2\r\n", b'"step,a\r\n1,2\r\n'):
        (path / "metrics.csv").write_bytes(garbage)
        with pytest.raises(DamagedFileError, match=r"metrics\.csv is damaged: no table of steps"):
            RunFolder(path, read_only=True).read_metrics()


def test_what_was_logged_in_part_is_logged_once(renderer, run_path, tmp_path, monkeypatch):
    log_metrics = RunFolder.log_metrics

    def cut_short(self, step, *logged):
        if step in (3, 4) and len(ended) < step - 2:
            ended.append(step)
            with self.rollouts_path.open("a") as file:
                file.write('{"step": 3, "split": "train", "roll')
            raise OSError("the disk is full")
        log_metrics(self, step, *logged)

    monkeypatch.setattr(RunFolder, "log_metrics", cut_short)
    ended: list[int] = []
    for resume in (False, True):
        with pytest.raises(OSError, match="disk is full"):
            train(tmp_path / "run", renderer, resume=resume)
    train(tmp_path / "run", renderer, resume=True)
    assert ended == [3, 4]
    paths = [run_path, tmp_path / "run"]
    ids = [{(line["step"], line["split"], line["rollout_id"]): None for line in lines_of(path)} for path in paths]
    assert [len(of_run) for of_run in ids] == [len(lines_of(path)) for path in paths]
    assert Counter(key[:2] for key in ids[0]) == Counter(key[:2] for key in ids[1])
    weights = [json.loads((path / "weights.json").read_text()) for path in paths]
    assert weights[0] == weights[1]


def test_what_killed_writers_leave_is_removed_by_the_next_writer(run_path, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_path, path)
    left = [
        path / ".checkpoint.safetensors.tmp",
        path / "batches/.000006.safetensors.tmp",
        path / "tokens/.000006.npz.tmp",
    ]
    for file in left:
        file.write_bytes(b"half")
    RunFolder(path, read_only=True)
    assert all(file.exists() for file in left)
    RunFolder(path, resume=True, trackers=())
    assert not any(file.exists() for file in left)


# Sent folders, flipped bits


class Attack:
    """Unpickled it leaves a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_no_file_of_a_run_executes_anything(run_path, tmp_path):
    mark = tmp_path / "mark"
    pickle.loads(pickle.dumps(Attack(mark)))
    assert mark.exists()
    mark.unlink()
    torch.save(Attack(mark), tmp_path / "torch")
    np.savez(tmp_path / "numpy.npz", lengths=np.array([Attack(mark)], dtype=object))
    payloads = [
        pickle.dumps(Attack(mark)),
        (tmp_path / "torch").read_bytes(),
        (tmp_path / "numpy.npz").read_bytes(),
        f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{mark}']]\n".encode(),
    ]
    for payload in payloads:
        path = tmp_path / "run"
        shutil.copytree(run_path, path)
        for file in path.rglob("*"):
            if file.is_file():
                file.write_bytes(payload)
        said = errors_of(path)
        for name in ("checkpoint.safetensors", "batches/000005.safetensors", "tokens/000005.npz", "config.yaml"):
            assert f"{path / name} is damaged" in said
        assert said.count("found a pickle, which is never read") == (0 if payload is payloads[-1] else 3)
        shutil.rmtree(path)
    assert not mark.exists()


def errors_of(path):
    """What everything that reads a run's folder says of it."""
    said = []
    folder = RunFolder(path, read_only=True)
    composed = OmegaConf.create({"run": {"path": str(path)}, "dry_run": False})
    steps = [int(file.stem) for file in folder.batches_path.glob("*.safetensors")]
    loads = [functools.partial(read, step) for read in (folder.load_batch, folder.tokens.read) for step in steps]
    for read in (
        folder.read_metrics, folder.read_summary, folder.load_checkpoint, *loads, lambda: resumed_config(composed),
        lambda: read_run(path), lambda: AutoTokenizer.from_pretrained(folder.tokenizer_path, trust_remote_code=False),
    ):  # fmt: skip
        try:
            read()
        except (ValueError, OSError) as error:
            said.append(str(error))
    return "\n".join(said)


def test_a_flipped_bit_is_noticed_wherever_it_is(run_path, tmp_path):
    chosen = random.Random(0)
    files = [run_path / "checkpoint.safetensors", *sorted(run_path.glob("batches/*.safetensors"))]
    for number in range(60):
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        place = number if number < 10 else chosen.randrange(len(data))
        data[place] ^= 1 << chosen.randrange(8)
        damaged = tmp_path / file.name
        for content in (data, data[:place]):
            damaged.write_bytes(content)
            with pytest.raises(DamagedFileError, match=f"{damaged} is damaged.* Replace it.$"):
                load_state(damaged, advice="Replace it.")


def test_a_damaged_batch_is_removed_and_collected_anew(renderer, run_path, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_path, path)
    (batch,) = path.glob("batches/000005.safetensors")
    batch.write_bytes(batch.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedFileError, match=f"{batch} is damaged.*Remove it .* step 5 is then collected anew"):
        train(path, renderer, resume=True)
    batch.unlink()
    train(path, renderer, resume=True)
    assert (path / "weights.json").read_text() == (run_path / "weights.json").read_text()


def test_states_come_back_as_they_were(tmp_path):
    weight = torch.randn(3, 2)
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b", "x": {"$tensor": "0"}}]]
    rows = [
        TensorDict(tokens=Tokens(full=torch.arange(size), batch_size=()), name=f"row {size}", data={"one": weight[0]})
        for size in (2, 0)
    ]
    for row, chat in zip(rows, chats, strict=True):
        row["history"] = History.from_chats(chat)
    kinds = [torch.ones(2, dtype=kind) for kind in (torch.bool, torch.bfloat16, torch.int8)]
    state = {
        "tied": [weight, weight], "kinds": kinds, "turns": History.from_chats(chats),
        "rows": lazy_stack(rows), "empty": TensorDict(batch_size=[0]), 3: (1, 2.5, None, True, float("-inf"), 2**70),
        "$tensor": {"a": b"\0\xff"}, "random": random_states(), "number": np.float32(0.1),
        "ragged": torch.arange(6).view(2, 3).T, "": "\ud800",
    }  # fmt: skip
    save_state(tmp_path / "state", state)
    loaded = load_state(tmp_path / "state", advice="")
    assert loaded.keys() == state.keys() and loaded[3] == state[3] and loaded["$tensor"] == state["$tensor"]
    assert all(torch.equal(one, weight) for one in loaded["tied"])
    assert loaded["tied"][0].data_ptr() == loaded["tied"][1].data_ptr()
    assert [(one.dtype, one.tolist()) for one in loaded["kinds"]] == [
        (one.dtype, one.tolist()) for one in state["kinds"]
    ]
    assert isinstance(loaded["rows"], LazyStackedTensorDict) and loaded["empty"].batch_size == (0,)
    for row, given in zip(loaded["rows"].unbind(0), rows, strict=True):
        assert isinstance(row["tokens"], Tokens) and torch.equal(row["tokens", "full"], given["tokens", "full"])
        assert row["name"] == given["name"] and torch.equal(row["data", "one"], weight[0])
    assert loaded["rows"]["history"].to_chats() == chats == loaded["turns"].to_chats()
    assert loaded["random"]["python"] == random.getstate() and loaded["number"] == np.float32(0.1)
    numpy_state = np.random.get_state()
    assert (loaded["random"]["numpy"][1] == numpy_state[1]).all() and loaded["random"]["numpy"][2:] == numpy_state[2:]
    assert torch.equal(loaded["ragged"], state["ragged"]) and loaded[""] == "\ud800"
    for wrong, words in ((object(), r"the object at \['a'\]\[0\]"), (torch.ones(2).to_sparse(), "torch.sparse_coo")):
        with pytest.raises(TypeError, match=words):
            save_state(tmp_path / "state", {"a": [wrong]})


def test_what_a_run_leaves_is_its_owners_alone(tmp_path):
    before = os.umask(0o022)
    try:
        RunFolder(tmp_path / "run", trackers=())
        DoubleBuffer(tmp_path / "weights").write({"weight": torch.ones(2)})
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "weights")] == [0o700, 0o700]


# A run that is resumed as another


def test_a_run_is_resumed_with_its_own_data_alone(renderer, run_path, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(run_path, path)
    other = [*SUMS[:-1], {**SUMS[-1], "answer": "11"}]
    with pytest.raises(ValueError, match=r"digest='[0-9a-f]{16}' there, '[0-9a-f]{16}' here"):
        train(path, renderer, resume=True, sums=other)
    with pytest.raises(ValueError, match="seed=0 and cannot continue with 1"):
        train(path, renderer, resume=True, seed=1)
    asked = OmegaConf.load(path / "config.yaml")
    asked.collect.temperature = 0.5
    assert resumed_config(asked)[1] == {"collect.temperature": (1.0, 0.5)}  # which is printed
    asked.collect.group_size = 4
    with pytest.raises(ValueError, match="group_size=3 and cannot continue with 4"):
        resumed_config(asked)
    train(path, renderer, resume=True)


def test_a_digest_of_data_is_of_what_it_holds_and_not_of_its_objects():
    def digest(rows):
        return PromptSampler(rows).state_dict()["order"]["digest"]

    rows = [{"query": str(number), "object": object(), 1: {2}} for number in range(3000)]
    assert digest(rows) == digest([{**row, "object": object()} for row in rows])
    assert digest(rows) != digest([{**row, "query": "0"} for row in rows])
    datasets = pytest.importorskip("datasets")
    columns = {"query": ["a", "b"]}
    assert digest(datasets.Dataset.from_dict(columns)) == digest([{"query": "a"}, {"query": "b"}])
