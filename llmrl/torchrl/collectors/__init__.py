"""The names of `torchrl.collectors`, with llmrl's classes for those of `torchrl.collectors.llm`."""

from typing import TYPE_CHECKING

from llmrl.torchrl.names import area

if not TYPE_CHECKING:
    __getattr__ = area(__name__)
