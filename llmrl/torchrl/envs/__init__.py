"""The names of `torchrl.envs`; those of its `llm` are llmrl's."""

from typing import TYPE_CHECKING

from llmrl.torchrl.envs.vecnorm import VecNormV2
from llmrl.torchrl.names import area

__all__ = ["VecNormV2"]

if not TYPE_CHECKING:
    __getattr__ = area(__name__)
