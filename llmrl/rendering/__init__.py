"""Conversion between messages and tokens: renderers, conversations, training rows."""

from __future__ import annotations

import llmrl.rendering.call_formats  # registers the parsers
import llmrl.rendering.tag_formats  # noqa: F401  # registers the parsers
from llmrl.data.content_marks import RenderingError
from llmrl.rendering.backend import PackageRenderer, make_renderer
from llmrl.rendering.base import Renderer
from llmrl.rendering.conversation import Conversation
from llmrl.rendering.demonstration import demonstrate
from llmrl.rendering.reconciler import DEFAULT_FORK_THRESHOLD_TOKENS, classify, common_prefix_length
from llmrl.rendering.rows import Reconciliation, Row, reconcile
from llmrl.rendering.template import TemplateRenderer
from llmrl.rendering.tool_calls import TOOL_CALL_PARSERS, ParsedCalls, register_tool_call_parser
from llmrl.rendering.turn import TurnNode

__all__ = [
    "DEFAULT_FORK_THRESHOLD_TOKENS",
    "TOOL_CALL_PARSERS",
    "Conversation",
    "PackageRenderer",
    "ParsedCalls",
    "Reconciliation",
    "Renderer",
    "RenderingError",
    "Row",
    "TemplateRenderer",
    "TurnNode",
    "classify",
    "common_prefix_length",
    "demonstrate",
    "make_renderer",
    "reconcile",
    "register_tool_call_parser",
]
