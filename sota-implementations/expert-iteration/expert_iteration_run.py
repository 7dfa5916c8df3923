"""What both scripts of expert iteration run: a configuration, the best of each group, and a buffer of them."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.objectives import SFTLoss, TopKRewardSelector
from llmrl.runs.run_config import own_config
from llmrl.runs.run_setup import task_env
from llmrl.runs.training_run import TrainingRun
from llmrl.trainer import TransformersWrapper, train_step


class LearnTheBest:
    """Adds the best answers of a step to a buffer, and trains on samples of it.

    The buffer outlives the step: at first few answers are right, and those few are learned again and again.
    """

    log_probs = None

    def __init__(self, cfg: DictConfig, actor: TransformersWrapper, optimizer: torch.optim.Optimizer) -> None:
        self.cfg, self.optimizer, self.loss = cfg.train, optimizer, SFTLoss(actor)
        storage = LazyStackStorage(cfg.train.buffer_size)
        self.buffer = ReplayBuffer(storage=storage, batch_size=cfg.train.rows_per_update)
        self.rows: list[TensorDictBase] = []
        self.num_kept = self.num_learned = 0

    @property
    def needs_rows(self) -> bool:
        """Whether the rows so far were learned often enough; before the first there is nothing to learn from."""
        return self.num_learned >= self.cfg.max_reuse * self.num_kept

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Keep the rows, then make the step's updates."""
        if batch.shape[0]:
            self.rows = [*self.rows, *batch.unbind(0)][-self.cfg.buffer_size :]
            self.buffer.extend(batch)
            self.num_kept += batch.shape[0]
        metrics = {"num_kept_rows": float(batch.shape[0]), "num_buffer_rows": float(len(self.buffer))}
        metrics["is_skipped"] = 1.0  # unless there are rows to learn
        for _ in range(self.cfg.num_updates if self.rows else 0):
            report = train_step(self.loss, self.buffer.sample(), self.optimizer, max_grad_norm=self.cfg.max_grad_norm)
            metrics |= report.to_metrics()
            self.num_learned += self.cfg.rows_per_update
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The rows that are kept, and the counts."""
        return {"rows": self.rows, "num_kept": self.num_kept, "num_learned": self.num_learned}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.buffer.empty()
        self.rows, self.num_kept, self.num_learned = state["rows"], state["num_kept"], state["num_learned"]
        if self.rows:
            self.buffer.extend(torch.stack(self.rows, 0))


def make_run(cfg: DictConfig, **parts: Any) -> TrainingRun:
    """The best answers of each group, learned by supervised training. `parts` are arguments of `TrainingRun`."""
    cfg = own_config(cfg, console=parts.get("console"))
    return TrainingRun(
        cfg,
        make_env=task_env,
        make_update=lambda actor, optimizer: LearnTheBest(cfg, actor, optimizer),
        postproc=TopKRewardSelector(cfg.collect.group_size, cfg.collect.num_best).select,
        **parts,
    )
