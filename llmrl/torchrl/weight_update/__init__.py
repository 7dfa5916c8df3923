"""The names of `torchrl.weight_update`, with llmrl's classes for those of `torchrl.weight_update.llm`."""

from typing import TYPE_CHECKING

from llmrl.torchrl.names import area

if not TYPE_CHECKING:
    __getattr__ = area(__name__)
