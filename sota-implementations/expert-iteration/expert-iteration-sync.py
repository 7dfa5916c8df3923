"""Expert iteration: sample, keep the best answers of each prompt, learn them by supervised training, again.

python sota-implementations/expert-iteration/expert-iteration-sync.py               # one-digit sums, on two cores
python sota-implementations/expert-iteration/expert-iteration-sync.py run.path=runs/mine seed=1
python sota-implementations/expert-iteration/expert-iteration-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from rich.console import Console
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer

from llmrl.envs import make_addition_env
from llmrl.live_view import LiveView
from llmrl.objectives import SFTLoss, TopKRewardSelector, train_step
from llmrl.policies import TransformersWrapper
from llmrl.training_run import TrainingRun


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

    def __call__(self, batch: TensorDictBase) -> dict[str, float]:
        """Keep the rows, then make the step's updates."""
        if batch.shape[0]:
            self.rows = [*self.rows, *batch.unbind(0)][-self.cfg.buffer_size :]
            self.buffer.extend(batch)
        metrics = {"num_kept_rows": float(batch.shape[0]), "num_buffer_rows": float(len(self.buffer))}
        for _ in range(self.cfg.num_updates if len(self.buffer) else 0):
            report = train_step(self.loss, self.buffer.sample(), self.optimizer, max_grad_norm=self.cfg.max_grad_norm)
            metrics |= report.to_metrics()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The rows that are kept."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.buffer.empty()
        if state["rows"]:
            self.rows = state["rows"]
            self.buffer.extend(torch.stack(self.rows, 0))


def train(run: TrainingRun, first_step: int, view: LiveView) -> None:
    """Generate, keep the best, learn, sync, until the last step."""
    step, batches = first_step, iter(run.collector)
    while step < run.cfg.train.num_steps:
        step += 1
        view.doing("generate")
        collected = run.collected(next(batches))
        run.folder.save_batch(step, collected)
        view.doing("train")
        metrics = run.train_on(step, collected)
        run.show(view, step, metrics)
        if metrics["reward_mean"] >= run.cfg.train.target_reward:
            break


@hydra.main(config_path="config", config_name="expert-iteration-sync", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    size = cfg.collect.group_size
    run = TrainingRun(
        cfg,
        Console(),
        env=make_addition_env("train", num_digits=cfg.env.num_digits, repeats=size, seed=cfg.seed),
        eval_env=make_addition_env("test", num_digits=cfg.env.num_digits, repeats=cfg.env.num_eval_samples),
        make_update=lambda actor, optimizer: LearnTheBest(cfg, actor, optimizer),
        postproc=TopKRewardSelector(size, cfg.collect.num_best).select,
    )
    try:
        run.execute(train, __file__)
    finally:
        run.close()


if __name__ == "__main__":
    main()
