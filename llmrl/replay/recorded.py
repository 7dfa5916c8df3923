"""`RecordedRun`: reads the recorded steps of a run. No code in the folder is executed."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch

from llmrl._utils.json_values import without_references
from llmrl._utils.types import StateDict
from llmrl.config.launch import typed
from llmrl.config.resumed import Entries, changes_of, load_config
from llmrl.config.sections import GRPOConfig, GRPOTrainConfig
from llmrl.data.state_file import DamagedFileError
from llmrl.runs.batch_source import SavedBatch
from llmrl.runs.machine import machine_of, other_facts
from llmrl.runs.run_folder import RunFolder
from llmrl.viewer.run_data import Record, read_records
from llmrl.watch.step_metrics import is_logged
from llmrl.watch.token_log import TokenRow


class RecordedRun:
    """The folder of a run, opened for reading only.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError: if the folder holds no run.
        DamagedFileError: if the configuration is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = RunFolder(self.path, read_only=True)
        self.entries: Entries = load_config(self.path)

    @cached_property
    def _metrics(self) -> dict[int, dict[str, float]]:
        _check_is_there(self.folder.metrics_path)
        return {int(row["step"]): row for row in self.folder.read_metrics()}

    @cached_property
    def all_records(self) -> list[Record]:
        """Records of all rollouts and evaluations. Raises FileNotFoundError without the file."""
        _check_is_there(self.folder.rollouts_path)
        return list(read_records(self.folder.rollouts_path))

    @cached_property
    def _records(self) -> dict[int, list[Record]]:
        by_step: dict[int, list[Record]] = defaultdict(list)
        for record in self.all_records:
            if record["split"] == "train":
                by_step[record["step"]].append(record)
        return by_step

    @property
    def steps(self) -> list[int]:
        """The logged training steps, ascending. Raises FileNotFoundError without `metrics.csv`."""
        return sorted(step for step in self._metrics if step and is_logged(self._metrics, step, "train"))

    def check_step(self, step: int) -> None:
        """Check that a step was logged, and that its rollouts and tokens exist.

        Raises:
            ValueError: if the step was not logged.
            FileNotFoundError: if the tokens of a step with an update are missing.
            DamagedFileError: if a file is damaged, or lacks rollouts of the step.
        """
        if step not in self.steps:
            known = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise ValueError(f"step must be a logged step of {self.folder.metrics_path} ({known}), got {step}.")
        recorded = {record["rollout_id"] for record in self.records(step)}
        if lost := sorted({row.rollout_id for row in self.rows(step)} - recorded):
            raise DamagedFileError(
                f"{self.folder.rollouts_path} is cut or damaged: it lacks {len(lost)} of the rollouts of step {step}, "
                f"{lost[0]} among them. Restore it from a copy."
            )

    def metrics(self, step: int) -> dict[str, float]:
        """Return the recorded metrics of a step, rounded as in `metrics.csv`."""
        return self._metrics.get(step, {})

    def records(self, step: int) -> list[Record]:
        """Return the records of a step. Raises DamagedFileError if the records are missing."""
        records = self._records.get(step, [])
        if not records and self.metrics(step).get("num_rollouts"):
            raise DamagedFileError(f"{self.folder.rollouts_path} is cut: it has no rollout of step {step}.")
        return records

    def rows(self, step: int) -> list[TokenRow]:
        """Return the rows of a step, trained rows first; empty if there was nothing to train on.

        Raises FileNotFoundError if the file of the rows is missing, and DamagedFileError if it is damaged.
        """
        is_stored = (step, "train") in self.folder.tokens.steps()
        if not (is_stored or self.metrics(step).get("num_rows")):
            return []
        return self.folder.tokens.read(step)

    def config(self, changes: Sequence[str] = ()) -> GRPOConfig:
        """Return the run's configuration, changed by entries such as `train.clip_epsilon=0.3`, for this machine.

        The number of ranks is kept, because it determines the order of sums; it is 1 if this
        machine has fewer GPUs or cores.

        Raises ValueError if the algorithm of the run is not GRPO, or if an entry is unknown or out of range.
        """
        cfg = self._typed(changes)
        cfg.engine = replace(cfg.engine, use_ray=False)  # no GPU is reserved for the trainer
        cfg.train = _on_this_machine(cfg.train)
        return cfg

    def changes_here(self) -> dict[str, tuple[object, object]]:
        """Return the entries of `train` that this machine does not support, with both values."""
        return changes_of({"train": asdict(self._typed().train)}, {"train": asdict(self.config().train)})

    def machine_changes(self, step: int) -> dict[str, tuple[object, object]]:
        """Return the known facts of a step's machine that differ on this one, with both values."""
        return other_facts(self.folder.machines.at(step), machine_of(self.config().train.device))

    def _typed(self, changes: Sequence[str] = ()) -> GRPOConfig:
        from omegaconf import OmegaConf

        if self.entries.get("algorithm") != "grpo":
            raise ValueError(
                f"{self.path} has algorithm={self.entries.get('algorithm')!r}, and only steps of algorithm='grpo' can "
                "be computed again. Other algorithms support quantities=['rewards', 'advantages']."
            )
        here: Entries = {"collect": {"num_collectors": None, "max_concurrent_rollouts": None}}
        here |= {"resume": False, "dry_run": False}
        recorded = without_references(self.entries)
        return typed(OmegaConf.merge(recorded, OmegaConf.from_dotlist(list(changes)), here), GRPOConfig)

    def check_batches(self, first: int, last: int) -> None:
        """Raise ValueError if the batch of one of these steps was not kept."""
        missing = set(range(first, last + 1)) - set(self.folder.saved_steps())
        if missing:
            raise ValueError(
                f"{self.path} has not kept the batch of step {min(missing)}: a run with run.keep_batches=true keeps "
                "all batches. Rewards and advantages need no batch (--quantities rewards,advantages)."
            )

    def batch(self, step: int) -> SavedBatch:
        """Return the batch of a step. Raises ValueError if the batch was not kept."""
        self.check_batches(step, step)
        return cast(SavedBatch, self.folder.load_batch(step))

    @cached_property
    def _checkpoint_step(self) -> int:
        return self.folder.checkpoint_step()

    def start_of(self, step: int) -> StateDict | None:
        """Return the checkpoint from which to reach a step; None: from the initial model."""
        if not 0 < self._checkpoint_step < step:
            return None
        return self.folder.load_checkpoint()

    def checkpoint_of(self, step: int) -> StateDict | None:
        """Return the checkpoint that was saved after a step, or None if there is none."""
        if self._checkpoint_step != step:
            return None
        return self.folder.load_checkpoint()


def _check_is_there(path: Path) -> None:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: it was lost (restore it from a copy), or no step was logged.")


def _on_this_machine(train: GRPOTrainConfig) -> GRPOTrainConfig:
    """Return the entries of a trainer for the GPUs of this machine, or for the CPU."""
    num_gpus = torch.cuda.device_count()
    if train.device != "cpu" and num_gpus:
        are_enough = train.num_ranks <= num_gpus
        here = replace(train, device="cuda")
    else:
        are_enough = train.device == "cpu" and train.num_ranks <= (os.cpu_count() or 1)
        here = replace(train, device="cpu", head_kernel="torch")
    if are_enough:
        return here
    return replace(here, num_ranks=1, context_ranks=1)
