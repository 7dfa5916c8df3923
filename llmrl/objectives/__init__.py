"""Losses, advantages and training steps."""

from llmrl.objectives.advantages import MCAdvantage, group_advantages
from llmrl.objectives.aggregation import aggregation_weights
from llmrl.objectives.clipping import clipped_importance, clipped_surrogate
from llmrl.objectives.grpo import DAPO, CISPOLoss, GRPOLoss
from llmrl.objectives.kl import kl_estimate
from llmrl.objectives.outputs import CISPOLossOutput, DAPOLossOutput, GRPOLossOutput, LLMLossOutput
from llmrl.objectives.ratios import (
    effective_sample_size,
    sequence_log_ratio,
    token_log_ratio,
    truncated_importance,
)
from llmrl.objectives.training import TrainStepReport, train_step

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "LLMLossOutput",
    "MCAdvantage",
    "TrainStepReport",
    "aggregation_weights",
    "clipped_importance",
    "clipped_surrogate",
    "effective_sample_size",
    "group_advantages",
    "kl_estimate",
    "sequence_log_ratio",
    "token_log_ratio",
    "train_step",
    "truncated_importance",
]
