"""GRPO, asynchronous: the engine generates the next batches while this process trains on one.

Groups are at most `collect.max_staleness` versions old when they are trained on; weights change under requests in
flight, and every token knows the version that sampled it.

python sota-implementations/grpo/grpo-async.py                          # as the demo, overlapped
python sota-implementations/grpo/grpo-async.py run.path=runs/mine seed=1 collect.max_staleness=2
python sota-implementations/grpo/grpo-async.py run.path=runs/mine resume=true
"""

from __future__ import annotations

import os

# Before torch: idle threads that spin would take the engine's cores.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import hydra
import torch
from grpo_run import make_run
from omegaconf import DictConfig
from rich.console import Console

from llmrl.live_view import LiveView
from llmrl.training_run import TrainingRun


def train(run: TrainingRun, first_step: int, view: LiveView) -> None:
    """Take what is ready, train, sync; the collector goes on by itself, as far ahead as it may."""
    step, batches = first_step, iter(run.collector)
    while step < run.cfg.train.num_steps:
        step += 1
        view.doing("wait for a batch")
        collected = run.collected(next(batches))  # its state has the groups in flight: a kill plays them again
        run.folder.save_batch(step, collected)
        view.doing("train, and generate")
        metrics = run.train_on(step, collected)
        run.show(view, step, metrics)
        if metrics["reward_mean"] >= run.cfg.train.target_reward:
            break


@hydra.main(config_path="config", config_name="grpo-async", version_base=None)
def main(cfg: DictConfig) -> None:
    """Set up, train, report."""
    torch.set_num_threads(cfg.train.cpu_threads)  # the engine has the other cores
    run = make_run(cfg, Console(), max_staleness=cfg.collect.max_staleness)
    try:
        run.execute(train, __file__)
    finally:
        run.close()


if __name__ == "__main__":
    main()
