"""`RunFolder`: everything a training run leaves behind, written so that a kill at any moment leaves it readable."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Protocol

import numpy as np
import torch

from llmrl._utils.files import write_atomically
from llmrl._utils.types import JSON, StateDict, Tokenizer
from llmrl.runs.token_log import TokenLog
from llmrl.runs.tracking import CSVTracker, open_trackers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Parameters = ParamSpec("Parameters")


class Stateful(Protocol):
    """What a checkpoint can hold."""

    def state_dict(self) -> StateDict:
        """Everything needed to go on."""
        ...

    def load_state_dict(self, state_dict: StateDict) -> object:
        """The reverse of `state_dict`."""
        ...


def holds_run(path: Path) -> bool:
    """Whether a run has begun in a folder: one whose engine did not start has not."""
    recorded = ("rollouts.jsonl", "metrics.csv", "batches/*")
    return any(any(path.glob(name)) for name in recorded)


class RunFolder:
    """A folder with `metrics.csv`, `tensorboard/`, `rollouts.jsonl`, `tokens/`, `batches/`, `checkpoint.pt`, `model/`.

    Recovery is by replay: each step's training rows are written (they are small) before the optimizer uses them, the
    large model and optimizer states only now and then. A resumed run loads the last checkpoint and trains again on
    the rows written since, so that a kill loses nothing but the step that was being collected.

    Args:
        path: the folder, created when missing.
        resume: continue what is there; otherwise the folder must not hold a run.
        trackers: where metrics go besides `metrics.csv`: any of `"tensorboard"`, `"wandb"`, `"trackio"`, none for a
            folder that is only read. See `llmrl.runs.tracking`.

    Raises:
        FileExistsError: when the folder holds a run and `resume` is false.
        FileNotFoundError: when `resume` is true and there is none.
        ValueError: for an unknown tracker, with the nearest one.
        MissingExtraError: when a tracker's package is not installed, with the command that installs it.
    """

    def __init__(self, path: str | Path, *, resume: bool = False, trackers: Sequence[str] = ("tensorboard",)) -> None:
        self.path = Path(path)
        self.metrics_path = self.path / "metrics.csv"
        self.rollouts_path = self.path / "rollouts.jsonl"
        self.checkpoint_path = self.path / "checkpoint.pt"
        self.model_path = self.path / "model"
        self.curve_path = self.path / "curve.png"
        self.batches_path = self.path / "batches"
        self.summary_path = self.path / "summary.json"
        self.tokenizer_path = self.path / "tokenizer"
        self.tokens = TokenLog(self.path / "tokens")
        has_run = holds_run(self.path)
        if has_run and not resume:
            raise FileExistsError(
                f"{self.path} holds a run already; continue it with resume=true, or name another folder."
            )
        if resume and not has_run:
            raise FileNotFoundError(
                f"{self.path} holds no run to resume; name its folder with run.path, or start one without resume=true."
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._table = CSVTracker(self.metrics_path)
        self._trackers = open_trackers(trackers, self.path)
        self.batches_path.mkdir(exist_ok=True)

    # Metrics

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step's metrics to `metrics.csv`, and send them to the trackers."""
        for tracker in (self._table, *self._trackers):
            tracker.log_metrics(dict(metrics), step)

    def read_metrics(self) -> list[dict[str, float]]:
        """All steps' metrics; of a step logged twice (before and after a kill) the last."""
        return self._table.read()

    # Rollouts

    def log_rollouts(self, step: int, split: str, records: Iterable[Mapping[str, JSON]]) -> None:
        """Append rollout records (`Rollout.to_record`), one JSON object a line."""
        with self.rollouts_path.open("a") as file:
            for record in records:
                line = {"step": step, "split": split, **record}
                file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def save_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Keep the tokenizer, so that a viewer can name tokens while the run goes on."""
        tokenizer.save_pretrained(self.tokenizer_path)

    # Recovery

    def save_batch(self, step: int, collected: Mapping[str, object]) -> None:
        """Write what a step collected (rows, the state after them, what is to be logged) before it is trained on."""
        write_atomically(self.batches_path / f"{step:06d}.pt", lambda path: torch.save(dict(collected), path))

    def load_batch(self, step: int) -> StateDict | None:
        """What `save_batch` wrote for a step; None when it was not reached."""
        path = self.batches_path / f"{step:06d}.pt"
        return torch.load(path, weights_only=False) if path.exists() else None

    def save_checkpoint(self, state: StateDict) -> None:
        """Replace the checkpoint; `state["step"]` says after which step it was taken."""
        write_atomically(self.checkpoint_path, lambda path: torch.save(dict(state), path))
        for path in self.batches_path.glob("[0-9]*.pt"):
            if int(path.stem) < state["step"]:
                path.unlink()

    def load_checkpoint(self) -> StateDict | None:
        """The last checkpoint, memory-mapped; None before the first."""
        if not self.checkpoint_path.exists():
            return None
        return torch.load(self.checkpoint_path, weights_only=False, mmap=True)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Replace `summary.json`."""
        write_atomically(self.summary_path, lambda path: path.write_text(json.dumps(summary, indent=2) + "\n"))

    def read_summary(self) -> StateDict:
        """`summary.json`, empty when there is none."""
        return json.loads(self.summary_path.read_text()) if self.summary_path.exists() else {}

    def close(self) -> None:
        """Write what is buffered, and end the trackers."""
        for tracker in self._trackers:
            tracker.close()


def save_model(model: PreTrainedModel, tokenizer: Tokenizer, path: Path, dtype: torch.dtype) -> None:
    """Save in Hugging Face format, in the dtype that it was served in, adapters merged."""
    # A copy, so that tied weights stay tied and the trainer's float32 weights stay what they are.
    served = copy.deepcopy(model)
    if hasattr(served, "merge_and_unload"):  # peft's
        served = served.merge_and_unload()
    served.to(dtype).config.dtype = dtype
    served.save_pretrained(path)
    tokenizer.save_pretrained(path)


def seed_all(seed: int) -> None:
    """Seed Python's, numpy's and torch's random number generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_states() -> StateDict:
    """States of Python's, numpy's and torch's random number generators, those of GPUs that are in use included."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return {**states, "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def restore_random_states(states: StateDict) -> None:
    """Continue from saved `random_states`.

    Example:
        >>> states = random_states()
        >>> first = torch.rand(1)
        >>> restore_random_states(states)
        >>> bool(torch.rand(1) == first)
        True
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


class BackgroundWrites:
    """One write at a time in a background thread; `wait` before changing what is being written.

    Raises:
        Exception: on `wait`, whatever the write raised.

    Example:
        >>> written = []
        >>> writes = BackgroundWrites()
        >>> writes.start(written.append, 1)
        >>> writes.wait()
        >>> written
        [1]
    """

    def __init__(self) -> None:
        from concurrent.futures import Future, ThreadPoolExecutor

        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="llmrl-write")
        self._pending: Future[object] | None = None

    def start(
        self, function: Callable[Parameters, object], *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> None:
        """Run `function(*arguments)` in the background, after the write before it."""
        self.wait()
        self._pending = self._pool.submit(function, *arguments, **options)

    def wait(self) -> None:
        """Block until nothing is being written."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()
