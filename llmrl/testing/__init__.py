"""What tests and examples run on: scripted engines, a clock that nobody waits for, models that need no download."""

from __future__ import annotations

from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.testing.scripted_engine import ScriptedEngine
from llmrl.testing.tiny_model import make_tiny_model

__all__ = ["ScriptedEngine", "ensure_embedded_model", "make_tiny_model"]
