"""The names of `torchrl.data.llm`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrl.data import History, add_chat_template
from llmrl.objectives import TopKRewardSelector
from llmrl.torchrl.names import namespace

__all__ = ["History", "TopKRewardSelector", "add_chat_template"]

if not TYPE_CHECKING:
    __getattr__ = namespace(__name__)
