"""What both GRPO scripts run: a configuration, its loss and its advantages."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig

from llmrl.objectives import GRPOLoss, MCAdvantage
from llmrl.runs.run_config import own_config
from llmrl.runs.run_setup import plain, task_env
from llmrl.runs.training_run import LossUpdate, TrainingRun
from llmrl.trainer import TransformersWrapper


def make_loss(cfg: DictConfig, actor: TransformersWrapper) -> GRPOLoss:
    """The ratio is to the trainer's own log-probs; what the engine computes otherwise is a truncated weight."""
    return GRPOLoss(actor, clip_epsilon=plain(cfg.train.clip_epsilon), importance_cap=cfg.train.importance_cap)


def make_run(cfg: DictConfig, **parts: Any) -> TrainingRun:
    """Groups of answers to the same problem, compared with each other.

    `parts` are further arguments of `TrainingRun`. For an environment of your own put a function `(cfg, part)` that
    builds a `DatasetChatEnv`, transformed, in the place of `task_env`.
    """
    cfg = own_config(cfg, console=parts.get("console"))

    def make_update(actor: TransformersWrapper, optimizer: torch.optim.Optimizer) -> LossUpdate:
        return LossUpdate(make_loss(cfg, actor), optimizer, max_grad_norm=cfg.train.max_grad_norm)

    advantage = MCAdvantage(grpo_size=cfg.collect.group_size)
    return TrainingRun(cfg, make_env=task_env, make_update=make_update, postproc=advantage, **parts)
