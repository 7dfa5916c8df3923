"""GRPO, synchronous: generate a batch, train on it, hand the new weights to the engine, again.

python sota-implementations/grpo/grpo-sync.py                          # the demo
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine seed=1
python sota-implementations/grpo/grpo-sync.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
from grpo_run import make_run
from omegaconf import DictConfig
from rich.console import Console

from llmrl.live_view import LiveView
from llmrl.training_run import TrainingRun


def train(run: TrainingRun, first_step: int, view: LiveView) -> None:
    """Generate, train, sync, until the last step."""
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


@hydra.main(config_path="config", config_name="grpo-sync", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    run = make_run(cfg, Console())
    try:
        run.execute(train, __file__)
    finally:
        run.close()


if __name__ == "__main__":
    main()
