"""The names of `torchrl.modules`; those of its `llm` are llmrl's."""

from typing import TYPE_CHECKING

from llmrl.torchrl.names import area

if not TYPE_CHECKING:
    __getattr__ = area(__name__)
