"""`RunFolder`: the files of a training run, which stay readable if the run is killed at any moment."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec

import numpy as np
import torch

from llmrl._utils.failure import traceback_of
from llmrl._utils.files import (
    check_entries,
    clean_killed_writes,
    cut_lines,
    flush_to_disk,
    open_file,
    read_text,
    write_atomically,
)
from llmrl._utils.types import JSON, Row, StateDict, Tokenizer
from llmrl.collectors.rows import rollout_rows
from llmrl.data import Rollout
from llmrl.data.state_file import DamagedFileError, load_state, save_state
from llmrl.engines import EngineError
from llmrl.runs.folder_lock import FolderLock
from llmrl.runs.machine import MachineLog
from llmrl.watch.findings import HealthLog
from llmrl.watch.rollout_metrics import rollout_records
from llmrl.watch.step_metrics import is_logged, only_finite
from llmrl.watch.token_log import TokenLog
from llmrl.watch.tracking import CSVTracker, Tracker, grouped_name, open_trackers

Parameters = ParamSpec("Parameters")
_NAMES = (
    "lock",
    "metrics.csv",
    "*.jsonl",
    "config.yaml",
    "summary.json",
    "run_id",
    "curve.png",
    "view.html",
    "*.safetensors",
    "batches",
    "set-aside",
    "tokens",
    "tokenizer",
    "model",
    "model-best",
    "exports",
    "shards-*",
    "weights",
    "tensorboard",
    "wandb",
    "mlflow*",
    ".*.old",
    ".*.tmp",
)
"""Entries that a run, its trackers and its viewer may create."""
_LINKS = ("wandb/latest-run", "wandb/debug.log", "wandb/debug-internal.log", "wandb/*run-*/logs/debug-core.log")
"""Links that wandb creates. wandb replaces these links and does not follow them."""

_CHECKPOINT_ADVICE = "Put a copy of it in its place, or begin another run from an exported model in another folder."


def memory_kills() -> tuple[str, int]:
    """Return this machine's boot id, and the number of out-of-memory kills since boot."""
    try:
        counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), int(counters["oom_kill"])
    except (OSError, KeyError):
        return "", 0


def holds_run(path: Path) -> bool:
    """Return whether a folder contains a run that has recorded something; a run that failed to start has not."""
    recorded = ("rollouts.jsonl", "metrics.csv", "batches/*")
    return any(any(path.glob(name)) for name in recorded)


class RunFolder:
    """A folder with `metrics.csv`, `rollouts.jsonl`, `health.jsonl`, `tokens/`, `batches/`, `model/`, ….

    Each step's batch is saved before the optimizer uses it; checkpoints are saved less often. A resumed run loads the
    last checkpoint and replays the saved batches, so a kill loses at most the batch that was being collected.

    One process at a time writes into the folder. A new folder is accessible to its owner only
    (0700); an existing one keeps its mode. Incomplete files are removed when the folder is opened.

    Args:
        path: the folder, created if missing.
        resume: continue the run in the folder; otherwise the folder must not hold a run.
        read_only: open without a lock, to read while a run may write.
        trackers: receivers of the metrics besides `metrics.csv`: `"tensorboard"`, `"wandb"`, `"trackio"`, `"mlflow"`.

    Raises:
        FileExistsError: if the folder holds a run and `resume` is false.
        FileNotFoundError: if `resume` or `read_only` is true and the folder holds no run.
        FolderInUseError: if another process writes into the folder.
        ValueError: if a tracker is unknown.
        MissingExtraError: if a tracker's package is not installed.
        UnsafeFileError: if an entry is a link, a pipe, a socket or a device.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        resume: bool = False,
        read_only: bool = False,
        trackers: Sequence[str] = ("tensorboard",),
    ) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.csv"
        self.rollouts_path = self.path / "rollouts.jsonl"
        self.checkpoint_path = self.path / "checkpoint.safetensors"
        self.model_path = self.path / "model"
        self.exports_path = self.path / "exports"
        self.curve_path = self.path / "curve.png"
        self.batches_path = self.path / "batches"
        self.set_aside_path = self.path / "set-aside"
        self.summary_path = self.path / "summary.json"
        self.tokenizer_path = self.path / "tokenizer"
        self.tokens = TokenLog(self.path / "tokens")
        self.health = HealthLog(self.path / "health.jsonl")
        self.machines = MachineLog(self.path / "machines.jsonl")
        self._table = CSVTracker(self.metrics_path)
        self._trackers: list[Tracker] = []
        self._lock: FolderLock | None = None
        check_entries(self.path, _NAMES, links=_LINKS)
        if read_only:
            if not holds_run(self.path):
                raise FileNotFoundError(f"{self.path} holds no run: name the folder of a run.")
            return
        if resume and not holds_run(self.path):
            raise FileNotFoundError(
                f"{self.path} holds no run to resume; name its folder with run.path, or start a new run without "
                "resume=true."
            )
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = FolderLock(self.path)
        try:
            if holds_run(self.path) and not resume:
                raise FileExistsError(
                    f"{self.path} holds a run already; continue it with resume=true, or name another folder."
                )
            for path in (self.metrics_path, self.rollouts_path, self.health.path, self.machines.path):
                cut_lines(path)
            for folder in (self.path, self.batches_path, self.tokens.path, self.exports_path):
                clean_killed_writes(folder)
            self._trackers = open_trackers(trackers, self.path)
        except BaseException:
            self._lock.release()
            raise
        self.batches_path.mkdir(exist_ok=True)

    # Metrics

    def log_metrics(self, step: int, metrics: Mapping[str, float], traces: Sequence[Row] = ()) -> None:
        """Append one step's metrics to `metrics.csv`, and send them to the trackers, with grouped names.

        Values that are not finite are left out. `traces` are rollout records for the trackers to show.
        """
        numbers = only_finite(metrics)
        self._table.log_metrics(numbers, step)
        grouped = {grouped_name(name): value for name, value in numbers.items()}
        for tracker in self._trackers:
            tracker.log_metrics(dict(grouped), step)
            if traces:
                tracker.log_traces(traces, step)

    def read_metrics(self) -> list[dict[str, float]]:
        """Return the metrics by step; a metric that was logged twice for a step has the last value."""
        return self._table.read()

    # Rollouts

    def log_rollouts(self, step: int, split: str, records: Iterable[Mapping[str, JSON]]) -> None:
        """Append rollout records (`Rollout.to_record`), one JSON object per line."""
        # JSON escapes lone surrogates, which UTF-8 cannot encode.
        with open_file(self.rollouts_path, "a", errors="backslashreplace") as file:
            for record in records:
                line = {"step": step, "split": split, **record}
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def log_evaluation(self, step: int, split: str, rollouts: Sequence[Rollout]) -> None:
        """Append the rollout records of an evaluation, and save its tokens."""
        self.log_rollouts(step, split, rollout_records(rollouts))
        rows = [row for rollout in rollouts for row in rollout.rows or rollout_rows(rollout)]
        if rows:
            self.tokens.write(step, rows, split=split)

    def drop_rollouts(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        """Drop the records at the end that belong to steps without logged metrics; these will be written again."""

        def is_kept(line: bytes) -> bool:
            try:
                record = json.loads(line)
                return is_logged(logged, record["step"], record["split"])
            except (ValueError, KeyError, TypeError):
                return False

        cut_lines(self.rollouts_path, is_kept)

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Save the tokenizer, so that a viewer can decode tokens during the run."""
        tokenizer.save_pretrained(self.tokenizer_path)

    # Recovery

    def save_batch(self, step: int, collected: Mapping[str, object]) -> None:
        """Save a step's collected rows, state and records before it trains. Raises TypeError for unsupported values."""
        write_atomically(self._batch_path(step), lambda path: save_state(path, dict(collected)))

    def load_batch(self, step: int) -> StateDict | None:
        """Return the saved batch of a step, or None. Raises DamagedFileError if the file is damaged."""
        advice = f"Remove it and the batches of later steps, and resume: step {step} is then collected anew."
        return _load(self._batch_path(step), advice)

    def saved_steps(self) -> list[int]:
        """Return the steps with a saved batch, in ascending order."""
        return sorted(int(path.stem) for path in self.batches_path.glob("[0-9]*.safetensors"))

    def saved_batches(self, first: int, say: Callable[[str], object]) -> Iterator[StateDict]:
        """Yield the saved batches from a step on, and mark the step that is being replayed.

        If the kernel killed the previous replay because memory ran out, this counts as a failure of
        the batch (`fail_replay`), which `say` reports.
        """
        mark = self.batches_path / "replaying.json"
        boot, num_kills = memory_kills()
        if mark.exists():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the mark may be incomplete
                was = json.loads(read_text(mark))
                if was["boot"] == boot and was["num_kills"] < num_kills and self._batch_path(was["step"]).exists():
                    say(self._count_failure(was["step"], "The kernel ended the process because memory ran out.\n"))
            mark.unlink()
        for step in itertools.count(first):
            if (saved := self.load_batch(step)) is None:
                return
            boot, num_kills = memory_kills()
            with open_file(mark, "w") as file:
                json.dump({"step": step, "boot": boot, "num_kills": num_kills}, file)
            try:
                yield saved
            finally:
                mark.unlink()

    def last_replayed(self, checkpoint: int, num_logged: int, checkpoint_every: int) -> int:
        """Return the last step that a resumed run replays: each step from the checkpoint to it has a saved batch.

        Batches after a batch that was set aside are removed, because a replay no longer reaches the
        weights that they were collected with.

        Args:
            checkpoint: step of the checkpoint; 0 if there is none.
            num_logged: last step with training metrics.
            checkpoint_every: number of steps between checkpoints.

        Raises ValueError if the checkpoint is missing, or older than the saved batches require.
        """
        saved = self.saved_steps()
        last = checkpoint
        while last + 1 in saved:
            last += 1
        later = [step for step in saved if step > last]
        if later and any(self.set_aside_path.glob(f"{last + 1:06d}-*.safetensors")):
            for step in later:
                self._batch_path(step).unlink()
        elif not checkpoint and (later or (last == 0 and num_logged > checkpoint_every)):
            raise ValueError(
                f"{self.checkpoint_path} is missing: the run has made {max(num_logged, *later, 1)} steps and would "
                "begin again with the initial model. To continue, put a copy of it in its place; to begin again, "
                "name another folder with run.path."
            )
        elif later:
            raise ValueError(
                f"{self.checkpoint_path} is from step {checkpoint}, and the saved batch of step {last + 1} is "
                f"missing, but the batch of step {later[0]} exists. Restore the last checkpoint, or, to repeat "
                f"the steps from {last + 1} on, remove the later batches from {self.batches_path}."
            )
        return last

    def _batch_path(self, step: int) -> Path:
        return self.batches_path / f"{step:06d}.safetensors"

    def fail_replay(self, step: int, error: BaseException | None) -> str:
        """Count a failed replay of a saved batch, set it aside after the second one, and return a message.

        Failures that the batch does not cause (an interrupt, `OSError`, `EngineError`) are not counted.
        """
        if not isinstance(error, Exception) or isinstance(error, OSError | EngineError):
            return ""
        return self._count_failure(step, traceback_of(error))

    def _count_failure(self, step: int, what: str) -> str:
        batch = self._batch_path(step)
        note = self.batches_path / f"{step:06d}.failed"
        is_first = not note.exists()
        with open_file(note, "a", errors="backslashreplace") as file:
            file.write(what)
        if is_first:
            return (
                f"the saved batch of step {step} failed when it was trained on again. After another failure, it is set "
                f"aside: correct the cause, or resume without a change. The error is in {note}."
            )
        self.set_aside_path.mkdir(exist_ok=True)
        number = max(self._set_aside(step), default=0) + 1
        aside = self.set_aside_path / f"{step:06d}-{number}.safetensors"
        note.replace(aside.with_suffix(".failed"))
        batch.replace(aside)
        return (
            f"the saved batch of step {step} failed twice when it was trained on again, and is set aside as "
            f"{aside}: a resumed run uses the next batch for step {step}. To train on it after all, move it back to "
            f"{batch}."
        )

    def load_set_aside(self, step: int) -> StateDict | None:
        """Return the last batch of a step that was set aside, or None."""
        paths = self._set_aside(step)
        advice = f"Remove it, and resume: step {step} is then collected from the same prompts."
        return load_state(paths[max(paths)], advice=advice) if paths else None

    def _set_aside(self, step: int) -> dict[int, Path]:
        """Return the batches of a step that were set aside, by their numbers."""
        paths = self.set_aside_path.glob(f"{step:06d}-*.safetensors")
        return {int(path.stem.partition("-")[2]): path for path in paths}

    def save_checkpoint(self, state: StateDict, *, keep_batches: bool = False) -> None:
        """Replace the checkpoint; `state["step"]` is the step after which it was taken.

        The batches of earlier steps are removed, unless `keep_batches`. Raises TypeError if
        `save_state` does not support a value.
        """
        for path in (self.metrics_path, self.rollouts_path):  # steps before the checkpoint are not replayed
            if path.exists():
                flush_to_disk(path)
        write_atomically(self.checkpoint_path, lambda path: save_state(path, dict(state)))
        if not keep_batches:
            for path in self.batches_path.glob("[0-9]*"):
                if int(path.stem) < state["step"]:
                    path.unlink()
        for folder in self.path.glob("shards-*"):  # of earlier checkpoints
            if folder.name != state.get("shards", {}).get("folder"):
                shutil.rmtree(folder)

    def load_checkpoint(self) -> StateDict | None:
        """Return the last checkpoint, memory-mapped, or None. Raises DamagedFileError if the file is damaged."""
        return _load(self.checkpoint_path, _CHECKPOINT_ADVICE)

    def checkpoint_step(self) -> int:
        """Return the step of the last checkpoint without reading its weights; 0 without a checkpoint."""
        checkpoint = _load(self.checkpoint_path, _CHECKPOINT_ADVICE, is_checked=False)
        return 0 if checkpoint is None else checkpoint["step"]

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Replace `summary.json`."""
        write_atomically(self.summary_path, lambda path: path.write_text(json.dumps(summary, indent=2) + "\n"))

    def read_summary(self) -> StateDict:
        """Return the content of `summary.json`; empty if the file is missing.

        Raises DamagedFileError if the file is not JSON.
        """
        if not self.summary_path.exists():
            return {}
        try:
            return json.loads(read_text(self.summary_path))
        except ValueError as error:
            raise DamagedFileError(f"{self.summary_path} is damaged: {error}. Remove it, and resume.") from error

    def close(self) -> None:
        """Write buffered data, close the trackers and release the lock."""
        with contextlib.ExitStack() as closing:
            if self._lock is not None:
                closing.callback(self._lock.release)
            for tracker in self._trackers:
                closing.callback(tracker.close)


def _load(path: Path, advice: str, *, is_checked: bool = True) -> StateDict | None:
    return load_state(path, advice=advice, is_checked=is_checked) if path.exists() else None


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's random number generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> StateDict:
    """Return the random states of Python, numpy, torch, and CUDA if it is in use."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def restore_random_states(states: StateDict) -> None:
    """Restore the states that `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


class BackgroundWrites:
    """Runs one write at a time in a thread. Call `wait`, which raises its error, before changing the data to write."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmrl-write")
        self._pending: Future[object] | None = None

    def start(
        self, function: Callable[Parameters, object], *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> None:
        """Run `function(*arguments, **options)` in the background, after the previous write."""
        self.wait()
        self._pending = self._pool.submit(function, *arguments, **options)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
