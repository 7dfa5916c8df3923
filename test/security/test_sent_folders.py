"""A run's folder from another person: resuming and viewing it change, read and wait for nothing outside."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
from pathlib import Path

import pytest
from fuzzing import fuzz_seeds
from killed_runs import train
from typer.testing import CliRunner

from llmrl._utils.files import UnsafeFileError, check_entries, open_file, write_atomically, write_folder_atomically
from llmrl.cli.app import app
from llmrl.rendering import TemplateRenderer
from llmrl.runs.exports import push_folder
from llmrl.runs.folder_lock import is_in_use
from llmrl.runs.run_folder import RunFolder
from llmrl.viewer import read_run, write_page

KINDS = ("link to a file", "link to a folder", "dangling link", "pipe", "socket", "device")
NAMES = (
    "lock",
    "metrics.csv",
    "rollouts.jsonl",
    "health.jsonl",
    "config.yaml",
    "summary.json",
    "checkpoint.safetensors",
    "batches",
    "batches/000005.safetensors",
    "batches/replaying.json",
    "tokens",
    "tokens/000005.npz",
    "tokenizer",
    "tokenizer/tokenizer_config.json",
    "set-aside",
    "set-aside/000005-1.safetensors",
    "exports",
    "exports/step-000002",
    "model",
    "model/config.json",
    "model-best",
    "shards-000002",
    "tensorboard",
    "wandb",
    "run_id",
    "curve.png",
    "view.html",
    ".view.html.tmp",
    ".metrics.csv.tmp",
    ".model.tmp",
    ".model.old",
    ".config.yaml.tmp",
    ".checkpoint.safetensors.tmp",
    "batches/.000005.safetensors.tmp",
)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return TemplateRenderer(tokenizer)


@pytest.fixture(scope="module")
def run_path(tmp_path_factory, renderer):
    path = tmp_path_factory.mktemp("sent") / "run"

    class Ended(Exception):
        pass

    def end(step, batch):
        if step == 5:
            raise Ended

    with contextlib.suppress(Ended):
        train(path, renderer, resume=False, on_step=end)
    return path


@pytest.fixture
def outside(tmp_path):
    """A folder of the reader's, with what a file of a run would have in it."""
    folder = tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").write_text("step,reward_mean\n1,0.5\nhalf a line")
    (folder / "inner/000001.safetensors").write_text("mine")
    (folder / "inner/old").write_text("mine")
    return folder


@contextlib.contextmanager
def no_hang():
    def hangs(number, frame):
        raise AssertionError("it hangs")

    previous = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(240)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def content(folder):
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def plant(path, kind, outside):
    """Put something in the place of a name; gives whether it could be made here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind == "link to a file":
        path.symlink_to(outside / "file")
    elif kind == "link to a folder":
        path.symlink_to(outside / "inner")
    elif kind == "dangling link":
        path.symlink_to(outside / "made")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(path.parent):
            one.bind(path.name)
    else:
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            return False
    return True


def resume(path, renderer):
    train(path, renderer, resume=True)


def view(path, renderer):
    is_in_use(path)
    with contextlib.suppress(FileNotFoundError):  # what makes it a run may be what was replaced
        write_page([read_run(path)], path / "view.html")
        for option in ("--terminal", "--png"):
            result = CliRunner().invoke(app, ["view", str(path), option])
            if result.exit_code:
                raise result.exception


def survive(path, name, kind, outside, renderer):
    before = content(outside)
    for do in (view, resume):
        with no_hang():
            try:
                do(path, renderer)
            except UnsafeFileError as error:
                assert name in str(error), (name, kind, do)
            except FileNotFoundError as error:
                assert "no run" in str(error), (name, kind, do, error)
        assert content(outside) == before, (name, kind, do)


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_of_a_run_leads_outside(run_path, outside, tmp_path, renderer, kind, takes_long):
    for number, name in enumerate(NAMES):
        path = tmp_path / f"run-{number}"
        shutil.copytree(run_path, path)
        if plant(path / name, kind, outside):
            survive(path, name, kind, outside, renderer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "wandb/settings",
        "wandb/wandb-resume.json",
        "wandb/offline-run-1/files/config.yaml",
        "wandb/run-1/logs/debug.log",
        "wandb/latest-run/run-1.wandb",
    ],
)
def test_what_wandb_would_open_is_looked_at(run_path, outside, tmp_path, name, kind):
    path = shutil.copytree(run_path, tmp_path / "run")
    if plant(path / name, kind, outside):
        with pytest.raises(UnsafeFileError, match=Path(name).name):
            RunFolder(path, read_only=True)


def test_links_that_wandb_makes_are_accepted_and_pipes_in_their_place_are_not(run_path, outside, tmp_path):
    path = shutil.copytree(run_path, tmp_path / "run")
    logs = path / "wandb/offline-run-1/logs"
    logs.mkdir(parents=True)
    (logs / "debug.log").write_text("")
    (logs / "debug-core.log").symlink_to(outside / "file")
    (path / "wandb/latest-run").symlink_to("offline-run-1")
    (path / "wandb/debug.log").symlink_to("offline-run-1/logs/debug.log")
    RunFolder(path, read_only=True)
    for name in ("latest-run", "debug.log", "offline-run-1/logs/debug-core.log"):
        (path / "wandb" / name).unlink()
        plant(path / "wandb" / name, "pipe", outside)
        with pytest.raises(UnsafeFileError, match=Path(name).name):
            RunFolder(path, read_only=True)
        (path / "wandb" / name).unlink()


def test_random_entries_of_random_kinds_lead_nowhere(run_path, outside, tmp_path, renderer, takes_long):
    for seed in fuzz_seeds(4):
        draw = random.Random(seed)
        path = tmp_path / "run"
        shutil.copytree(run_path, path)
        entries = [str(entry.relative_to(path)) for entry in sorted(path.rglob("*"))]
        name, kind = draw.choice([*entries, *NAMES]), draw.choice(KINDS)
        if plant(path / name, kind, outside):
            survive(path, Path(name).name, kind, outside, renderer)
        shutil.rmtree(path)


def test_a_temporary_name_cannot_be_waited_under(tmp_path, outside):
    before = content(outside)
    for name in (".page.html.tmp", ".folder.tmp"):
        (tmp_path / name).symlink_to(outside / "file")
    write_atomically(tmp_path / "page.html", lambda path: path.write_text("page"))
    write_folder_atomically(tmp_path / "folder", lambda path: (path / "a").write_text("a"))
    assert content(outside) == before and (tmp_path / "page.html").read_text() == "page"


def test_a_name_that_is_written_whole_is_replaced_and_not_followed(tmp_path, outside):
    before = content(outside)
    (tmp_path / "page.html").symlink_to(outside / "file")
    (tmp_path / "folder").symlink_to(outside / "inner")
    write_atomically(tmp_path / "page.html", lambda path: path.write_text("page"))
    write_folder_atomically(tmp_path / "folder", lambda path: (path / "a").write_text("a"))
    assert content(outside) == before
    assert not (tmp_path / "page.html").is_symlink() and not (tmp_path / "folder").is_symlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["r", "rb", "r+b", "w", "a", "a+b"])
def test_only_a_regular_file_is_opened(tmp_path, outside, kind, mode):
    before = content(outside)
    if plant(tmp_path / "file", kind, outside):
        with no_hang(), pytest.raises(UnsafeFileError, match="file must be a file, and is"):
            open_file(tmp_path / "file", mode)
    assert content(outside) == before


def test_files_are_opened_as_ever(tmp_path):
    path = tmp_path / "file"
    for mode, text in (("w", "one"), ("a", " two"), ("w", "three")):
        with open_file(path, mode) as file:
            file.write(text)
    with open_file(path, "r+b") as file:
        assert file.read() == b"three" and file.truncate(2) == 2
    assert open_file(path).read() == "th"
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")


def test_what_a_link_leads_to_is_not_pushed(tmp_path, outside):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/notes").symlink_to(outside / "file")
    with pytest.raises(UnsafeFileError, match="notes must be a file or a folder, and is a link to"):
        push_folder(tmp_path / "model", "me/model")


def test_entries_that_are_no_part_of_a_run_are_not_looked_at(tmp_path, outside):
    (tmp_path / "venv").symlink_to(outside)
    check_entries(tmp_path, ["lock", "*.csv"])
    (tmp_path / "a.csv").symlink_to(outside / "file")
    with pytest.raises(UnsafeFileError, match=r"a\.csv"):
        check_entries(tmp_path, ["lock", "*.csv"])
