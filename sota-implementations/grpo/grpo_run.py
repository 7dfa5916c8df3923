"""What both GRPO scripts train: the environment, the loss and the advantages of a configuration."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from rich.console import Console

from llmrl.envs import make_addition_env
from llmrl.objectives import GRPOLoss, MCAdvantage
from llmrl.policies import TransformersWrapper
from llmrl.training_run import LossUpdate, TrainingRun


def make_run(cfg: DictConfig, console: Console, *, max_staleness: int | None = None) -> TrainingRun:
    """Groups of answers to the same sum, compared with each other."""

    def make_update(actor: TransformersWrapper, optimizer: torch.optim.Optimizer) -> LossUpdate:
        loss = GRPOLoss(actor, clip_epsilon=cfg.train.clip_epsilon)
        return LossUpdate(loss, optimizer, max_grad_norm=cfg.train.max_grad_norm)

    num_digits, size = cfg.env.num_digits, cfg.collect.group_size
    return TrainingRun(
        cfg,
        console,
        env=make_addition_env("train", num_digits=num_digits, repeats=size, seed=cfg.seed),
        eval_env=make_addition_env("test", num_digits=num_digits, repeats=cfg.env.num_eval_samples),
        make_update=make_update,
        postproc=MCAdvantage(grpo_size=size),
        max_staleness=max_staleness,
    )
