"""The names of `torchrl.objectives.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.objectives import (
    DAPO,
    CISPOLoss,
    CISPOLossOutput,
    DAPOLossOutput,
    DistillationLoss,
    DistillationLossOutput,
    GRPOLoss,
    GRPOLossOutput,
    LLMLossOutput,
    MCAdvantage,
    MCAdvantageSelector,
    SFTLoss,
    SFTLossOutput,
    k3_kl_token_estimate,
)
from llmrl.torchrl.names import namespace

__all__ = [
    "DAPO",
    "CISPOLoss",
    "CISPOLossOutput",
    "DAPOLossOutput",
    "DistillationLoss",
    "DistillationLossOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "LLMLossOutput",
    "MCAdvantage",
    "MCAdvantageSelector",
    "SFTLoss",
    "SFTLossOutput",
    "k3_kl_token_estimate",
]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
