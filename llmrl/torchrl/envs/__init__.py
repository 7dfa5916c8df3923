"""The names of `torchrl.envs`, with llmrl's classes for those of `torchrl.envs.llm`."""

from typing import TYPE_CHECKING

from llmrl.torchrl.envs.vecnorm import VecNormV2
from llmrl.torchrl.names import area

__all__ = ["VecNormV2"]

if not TYPE_CHECKING:
    __getattr__ = area(__name__)
