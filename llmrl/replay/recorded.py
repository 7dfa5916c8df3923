"""`RecordedRun`: what the folder of a run says of each of its steps. Nothing in the folder is executed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import cast

import torch

from llmrl._utils.types import StateDict
from llmrl.config.launch import typed
from llmrl.config.resumed import Entries, load_config
from llmrl.config.sections import GRPOConfig, GRPOTrainConfig
from llmrl.runs.batch_source import SavedBatch
from llmrl.runs.run_folder import RunFolder
from llmrl.viewer.run_data import Record, read_records
from llmrl.watch.step_metrics import is_logged
from llmrl.watch.token_log import TokenRow


class RecordedRun:
    """A run's folder, read only.

    Args:
        path: the folder.

    Raises:
        FileNotFoundError: if the folder holds no run.
        DamagedFileError: if its configuration is missing or damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = RunFolder(self.path, read_only=True)
        self.entries: Entries = load_config(self.path)
        self._metrics = {int(row["step"]): row for row in self.folder.read_metrics()}

    @cached_property
    def _records(self) -> dict[int, list[Record]]:
        by_step: dict[int, list[Record]] = defaultdict(list)
        for record in read_records(self.folder.rollouts_path):
            if record["split"] == "train":
                by_step[record["step"]].append(record)
        return by_step

    @property
    def steps(self) -> list[int]:
        """The logged steps of training, in ascending order."""
        return sorted(step for step in self._metrics if step and is_logged(self._metrics, step, "train"))

    def check_step(self, step: int) -> None:
        """Raise ValueError if the step was not logged."""
        if step not in self.steps:
            known = f"{self.steps[0]} to {self.steps[-1]}" if self.steps else "none"
            raise ValueError(f"step must be one that {self.path} has logged ({known}), got {step}.")

    def metrics(self, step: int) -> dict[str, float]:
        """Return the recorded metrics of a step, rounded as `metrics.csv` is."""
        return self._metrics.get(step, {})

    def records(self, step: int) -> list[Record]:
        """Return the records of a step's rollouts."""
        return self._records.get(step, [])

    def rows(self, step: int) -> list[TokenRow]:
        """Return the rows of a step, those that were trained on first; none if they were not stored."""
        return self.folder.tokens.read(step) if (step, "train") in self.folder.tokens.steps() else []

    def config(self, changes: Sequence[str] = ()) -> GRPOConfig:
        """Return the run's configuration, changed by entries such as `train.clip_epsilon=0.3`, for this machine.

        The number of ranks is the run's, since it decides the order of sums; it is 1 if this machine lacks the GPUs.

        Raises ValueError if the run is not one of GRPO, or if an entry is unknown or out of range.
        """
        from omegaconf import OmegaConf

        if self.entries.get("algorithm") != "grpo":
            raise ValueError(
                f"{self.path} has algorithm={self.entries.get('algorithm')!r}; steps of algorithm='grpo' can be "
                "computed again, and rewards and advantages of others (quantities=['rewards', 'advantages'])."
            )
        here: Entries = {"collect": {"num_collectors": None, "max_concurrent_rollouts": None}}
        here |= {"resume": False, "dry_run": False}
        cfg = typed(OmegaConf.merge(self.entries, OmegaConf.from_dotlist(list(changes)), here), GRPOConfig)
        if cfg.train.device != "cpu":
            cfg.engine = replace(cfg.engine, use_ray=False)  # no GPU is reserved for the trainer
            cfg.train = _on_this_machine(cfg.train)
        return cfg

    def check_batches(self, first: int, last: int) -> None:
        """Raise ValueError if the batch of one of these steps was not kept."""
        missing = set(range(first, last + 1)) - set(self.folder.saved_steps())
        if missing:
            raise ValueError(
                f"{self.path} has not kept the batch of step {min(missing)}: a run with run.keep_batches=true keeps "
                "all of them. Rewards and advantages can be computed without it (--quantities rewards,advantages)."
            )

    def batch(self, step: int) -> SavedBatch:
        """Return what a step collected. Raises ValueError if it was not kept."""
        self.check_batches(step, step)
        return cast(SavedBatch, self.folder.load_batch(step))

    @cached_property
    def _checkpoint(self) -> StateDict | None:
        return self.folder.load_checkpoint()  # its checksum takes a second for each GB

    def start_of(self, step: int) -> StateDict | None:
        """Return the checkpoint to begin with in order to reach a step, or None to begin with the initial model."""
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint["step"] >= step:
            return None
        return checkpoint

    def checkpoint_of(self, step: int) -> StateDict | None:
        """Return the checkpoint that was taken after a step, if it is there."""
        checkpoint = self._checkpoint
        return checkpoint if checkpoint and checkpoint["step"] == step else None


def _on_this_machine(train: GRPOTrainConfig) -> GRPOTrainConfig:
    """Return the entries of a trainer on GPUs for those that are here, or for the CPU."""
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        return replace(train, device="cpu", num_ranks=1, head_kernel="torch")
    return replace(train, device="cuda", num_ranks=train.num_ranks if train.num_ranks <= num_gpus else 1)
