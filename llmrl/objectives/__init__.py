"""Losses, advantages and selectors."""

from llmrl.objectives.advantages.candidates import MCAdvantageSelector
from llmrl.objectives.advantages.mc_advantage import MCAdvantage
from llmrl.objectives.advantages.normalization import batch_normalized, group_advantages
from llmrl.objectives.advantages.teacher import TeacherAdvantage
from llmrl.objectives.advantages.top_k import TopKRewardSelector
from llmrl.objectives.kl import k3_kl_token_estimate, kl_estimate
from llmrl.objectives.losses.aggregation import aggregation_weights
from llmrl.objectives.losses.base import LLMLoss, MicroLoss
from llmrl.objectives.losses.clipping import clipped_importance, clipped_surrogate, is_within_trust_region
from llmrl.objectives.losses.distillation import DistillationLoss
from llmrl.objectives.losses.grpo import DAPO, CISPOLoss, GRPOLoss
from llmrl.objectives.losses.inputs import LossInputs, TokenInputs, read_inputs
from llmrl.objectives.losses.outputs import (
    CISPOLossOutput,
    DAPOLossOutput,
    DistillationLossOutput,
    GRPOLossOutput,
    LLMLossOutput,
    SFTLossOutput,
)
from llmrl.objectives.losses.sft import SFTLoss
from llmrl.objectives.losses.streams import (
    StreamsLoss,
    StreamsLossOutput,
    observed_tokens,
    trained_tokens,
    write_loss_weights,
)
from llmrl.objectives.losses.variants import DPPOLoss, DrGRPOLoss, GSPOLoss, RLOOLoss
from llmrl.objectives.penalties.kl_penalty import KLPenalty
from llmrl.objectives.penalties.length_penalty import LengthPenalty, group_relative_length, soft_overlong
from llmrl.objectives.ratios import (
    ImportanceBound,
    effective_sample_size,
    importance_weights,
    sequence_log_ratio,
    token_log_ratio,
)

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "DPPOLoss",
    "DistillationLoss",
    "DistillationLossOutput",
    "DrGRPOLoss",
    "GRPOLoss",
    "GRPOLossOutput",
    "GSPOLoss",
    "ImportanceBound",
    "KLPenalty",
    "LLMLoss",
    "LLMLossOutput",
    "LengthPenalty",
    "LossInputs",
    "MCAdvantage",
    "MCAdvantageSelector",
    "MicroLoss",
    "RLOOLoss",
    "SFTLoss",
    "SFTLossOutput",
    "StreamsLoss",
    "StreamsLossOutput",
    "TeacherAdvantage",
    "TokenInputs",
    "TopKRewardSelector",
    "aggregation_weights",
    "batch_normalized",
    "clipped_importance",
    "clipped_surrogate",
    "effective_sample_size",
    "group_advantages",
    "group_relative_length",
    "importance_weights",
    "is_within_trust_region",
    "k3_kl_token_estimate",
    "kl_estimate",
    "observed_tokens",
    "read_inputs",
    "sequence_log_ratio",
    "soft_overlong",
    "token_log_ratio",
    "trained_tokens",
    "write_loss_weights",
]
