"""Trackers of a run's metrics and conversations: `metrics.csv` in its folder, and optional others.

TensorBoard, Weights & Biases and trackio use torchrl's loggers. torchrl's MLflow logger cannot
continue a run, so `MLflowTracker` replaces it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from llmrl._utils.arguments import did_you_mean
from llmrl._utils.files import open_file, read_text, write_atomically
from llmrl._utils.imports import require
from llmrl._utils.types import JSON, Row
from llmrl.data import text_of
from llmrl.data.state_file import DamagedFileError

PROJECT = "llmrl"
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Names of the optional trackers."""


class Tracker(Protocol):
    """A destination of metrics and conversations."""

    def log_metrics(self, metrics: dict[str, float], step: int) -> object:
        """Record one step's metrics."""

    def log_traces(self, records: Sequence[Row], step: int) -> None:
        """Record conversations of a step, given as rollout records."""

    def close(self) -> None:
        """Write buffered data and close."""


_PERFORMANCE = ("seconds", "_per_second", "_gib")
"""Endings of the names of speed and memory metrics; names of engine metrics begin with `engine_`."""


def grouped_name(name: str) -> str:
    """Return a metric's name with a group as prefix; trackers arrange plots by group.

    Example:
        >>> [grouped_name(name) for name in ("reward_mean", "train_seconds", "eval/sums/pass@1")]
        ['train/reward_mean', 'perf/train_seconds', 'eval/sums/pass@1']
    """
    if name.startswith(("eval/", "env/")):
        return name
    return f"{'perf' if is_performance(name) else 'train'}/{name}"


def is_performance(name: str) -> bool:
    """Return whether a metric measures speed or memory, and so differs between equal runs."""
    return name.endswith(_PERFORMANCE) or name.startswith("engine_")


def spread(records: Sequence[Row], count: int) -> list[Row]:
    """Return at most `count` records, evenly spaced, because neighbours answer the same prompt.

    Example:
        >>> spread([{"reward": reward} for reward in range(8)], 3)
        [{'reward': 0}, {'reward': 2}, {'reward': 5}]
    """
    count = min(count, len(records))
    return [records[index * len(records) // count] for index in range(count)]


_TRACE_COLUMNS = ("rollout_id", "env", "reward", "status", "reason", "num_turns")


def trace_table(records: Sequence[Row], step: int) -> dict[str, list[JSON]]:
    """Return conversations as columns: facts about each conversation, and its text."""
    columns = {name: [record[name] for record in records] for name in _TRACE_COLUMNS}
    return {"step": [step] * len(records), **columns, "conversation": [_as_read(one["messages"]) for one in records]}


def _as_read(messages: Sequence[Row]) -> str:
    def said(message: Row) -> str:
        calls = [json.dumps(one["function"], ensure_ascii=False) for one in message.get("tool_calls") or ()]
        thoughts = message.get("reasoning_content")
        return "\n".join([*([thoughts] if thoughts else []), text_of(message.get("content")), *calls])

    return "\n\n".join(f"{message['role']}: {said(message)}" for message in messages)


def _written(value: float) -> str:
    return f"{value:.6g}"


def as_recorded(value: float) -> float:
    """Return a metric as rounded in `metrics.csv`, so that a resumed run makes the same decisions.

    Example:
        >>> as_recorded(2 / 3)
        0.666667
    """
    return float(_written(value))


class CSVTracker:
    """A CSV file with a row per call of `log_metrics`, created by the first call; new metrics add columns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a row. A new metric rewrites the file atomically."""
        named = {name.encode(errors="backslashreplace").decode(): _written(value) for name, value in metrics.items()}
        row = {"step": str(step), **named}
        rows, names = self._read_rows()
        if set(row) <= set(names):
            with open_file(self.path, "a", newline="") as file:
                csv.DictWriter(file, names).writerow(row)
            return
        names += [name for name in row if name not in names]

        def write(path: Path) -> None:
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows([*rows, row])

        write_atomically(self.path, write)

    def read(self) -> list[dict[str, float]]:
        """Return the metrics of each step, with the last value if a metric was logged twice.

        Raises DamagedFileError if the file is not a table of steps.
        """
        steps: dict[int, dict[str, float]] = {}
        for row in self._read_rows()[0]:
            numbers = {name: float(value) for name, value in row.items() if value}
            if "step" in numbers:
                steps.setdefault(int(numbers["step"]), {}).update(numbers)
        return list(steps.values())

    def close(self) -> None:
        """Do nothing, because `log_metrics` writes each row immediately."""

    def _read_rows(self) -> tuple[list[dict[str, str]], list[str]]:
        """Return the rows and the columns, without incomplete or invalid rows."""
        if not self.path.exists():
            return [], []
        text = read_text(self.path, newline="", errors="replace")
        lines = (f"{line}\n" for line in text.replace("\0", "").split("\n")[:-1])
        try:
            names = next(csv.reader(lines), [])
        except csv.Error:
            names = [""]
        if names and names[0] != "step":
            raise DamagedFileError(f"{self.path} is damaged: no table of steps. Remove it, or restore it from a copy.")
        rows = [line.rstrip("\r\n").split(",") for line in lines]
        return [dict(zip(names, row, strict=True)) for row in rows if _is_whole(row, names)], names


def _is_whole(row: list[str], names: list[str]) -> bool:
    try:
        return len(row) == len(names) and bool([float(value) for value in row if value])
    except ValueError:
        return False


def open_trackers(names: Sequence[str], path: Path) -> list[Tracker]:
    """Open the trackers of a run. A resumed run continues in its trackers, even if its folder was moved.

    Args:
        names: `"tensorboard"` writes into the folder. `"wandb"` follows its own settings, such as `WANDB_MODE=offline`,
            and `"trackio"` writes to its local database; the project is `WANDB_PROJECT`, or
            `llmrl`. `"mlflow"` writes to `MLFLOW_TRACKING_URI`, or to a database in the folder.

    Raises:
        TypeError: if `names` is a string.
        ValueError: if a name is unknown, or given twice.
        MissingExtraError: if a tracker's package is not installed.

    Example:
        >>> open_trackers(["wnadb"], Path("run"))
        Traceback (most recent call last):
        ...
        ValueError: trackers has no 'wnadb'; there are 'tensorboard', 'wandb', 'trackio', ... Did you mean 'wandb'?
    """
    if isinstance(names, str):
        raise TypeError(f"trackers must be a list of names, got the string {names!r}; write [{names!r}].")
    for name in names:
        if name not in _OPENERS:
            hint = did_you_mean(str(name), _OPENERS)
            if name == "csv":
                hint = " The table metrics.csv is always written."
            raise ValueError(f"trackers has no {name!r}; there are {', '.join(map(repr, _OPENERS))}.{hint}")
        require(name, extra={"tensorboard": "scripts", "mlflow": "mlflow"}.get(name, "tracking"))
    if len(set(names)) < len(names):
        raise ValueError(f"trackers names one twice: {list(names)}.")
    with contextlib.ExitStack() as opened:
        trackers = [opened.enter_context(contextlib.closing(_OPENERS[name](path))) for name in names]
        opened.pop_all()
    return trackers


def _open_tensorboard(path: Path) -> Tracker:
    from torchrl.record.loggers.tensorboard import TensorboardLogger

    class TensorboardTracker(TensorboardLogger):
        def log_traces(self, records: Sequence[Row], step: int) -> None:
            """Show a step's conversations as texts; TensorBoard keeps ten texts."""
            for number, text in enumerate(trace_table(records, step)["conversation"]):
                # Four spaces mark preformatted text in Markdown.
                indented = "\n".join(f"    {line}" for line in str(text).splitlines())
                self.experiment.add_text(f"traces/{number}", indented, global_step=step)

    return TensorboardTracker(exp_name="tensorboard", log_dir=str(path))


def _open_wandb(path: Path) -> Tracker:
    from torchrl.record.loggers.wandb import WandbLogger

    class WandbTracker(WandbLogger):
        def log_traces(self, records: Sequence[Row], step: int) -> None:
            """Show a step's conversations as a table."""
            import wandb

            columns = trace_table(records, step)
            rows = list(map(list, zip(*columns.values(), strict=True)))
            self.experiment.log({"train/traces": wandb.Table(columns=list(columns), data=rows), "train/step": step})

    return WandbTracker(
        exp_name=path.name,
        id=_run_id(path),
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        save_dir=path,
        log_env_packages=False,
    )


def _open_trackio(path: Path) -> Tracker:
    from torchrl.record.loggers.trackio import TrackioLogger

    class TrackioTracker(TrackioLogger):
        def log_traces(self, records: Sequence[Row], step: int) -> None:
            """Show a step's conversations as traces."""
            import trackio

            traces = [
                trackio.Trace(list(record["messages"]), {name: record[name] for name in _TRACE_COLUMNS})
                for record in records
            ]
            self.experiment.log({"train/traces": traces}, step=step)

        def close(self, timeout: float | None = None) -> None:
            """Write buffered data now; torchrl would wait for the end of the process."""
            import trackio

            super().close(timeout)
            if trackio.context_vars.current_run.get() is not None:
                trackio.finish()

    # trackio identifies runs by name, so runs in folders with the same name need an id in their names.
    return TrackioTracker(exp_name=f"{path.name}-{_run_id(path)}", project=PROJECT)


class MLflowTracker:
    """A run of MLflow, identified by the id in the run's folder; does not use MLflow's global state."""

    def __init__(self, path: Path) -> None:
        from mlflow import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = MlflowClient(uri or f"sqlite:///{path.absolute() / 'mlflow.db'}")
        experiment = self._client.get_experiment_by_name(PROJECT)
        artifacts = None if uri else (path.absolute() / "mlflow").as_uri()
        number = experiment.experiment_id if experiment else self._client.create_experiment(PROJECT, artifacts)
        tags = {"llmrl.run_id": _run_id(path)}
        runs = self._client.search_runs([number], f"tags.`llmrl.run_id` = '{tags['llmrl.run_id']}'")
        run = runs[0] if runs else self._client.create_run(number, tags=tags, run_name=path.name)
        self._id = run.info.run_id
        self._client.set_terminated(self._id, "RUNNING")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record a step's metrics; characters that MLflow refuses in names become `_`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        named = [(re.sub(r"[^\w\-. :/]", "_", name), value) for name, value in metrics.items()]
        self._client.log_batch(self._id, [Metric(name, value, now, step) for name, value in named])

    def log_traces(self, records: Sequence[Row], step: int) -> None:
        """Store a step's conversations as an artifact; MLflow lists tables in a tag of limited size."""
        self._client.log_dict(self._id, trace_table(records, step), f"traces/{step:06d}.json")

    def close(self) -> None:
        """Mark the run as finished; as failed if an exception is being handled, and as killed if it is an interrupt."""
        match sys.exception():
            case None:
                status = "FINISHED"
            case KeyboardInterrupt():
                status = "KILLED"
            case _:
                status = "FAILED"
        self._client.set_terminated(self._id, status)


_OPENERS: dict[str, Callable[[Path], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "trackio": _open_trackio,
    "mlflow": MLflowTracker,
}


def _run_id(path: Path) -> str:
    """Return the run's id for trackers, stored in the run's folder."""
    file = path / "run_id"
    if not file.exists():
        write_atomically(file, lambda path: path.write_text(secrets.token_hex(4)))
    return read_text(file)
