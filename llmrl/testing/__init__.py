"""Helpers for tests and examples: a scripted engine, virtual time, and models without downloads."""

from __future__ import annotations

from llmrl.testing.distributions import answers_of_length, log_normal, with_stragglers
from llmrl.testing.embedded_model import ensure_embedded_model
from llmrl.testing.sandbox_contract import check_sandbox
from llmrl.testing.scripted_engine import ScriptedEngine
from llmrl.testing.tiny_model import make_tiny_model
from llmrl.testing.virtual_time import VirtualTimeLoop, run_in_virtual_time

__all__ = [
    "ScriptedEngine",
    "VirtualTimeLoop",
    "answers_of_length",
    "check_sandbox",
    "ensure_embedded_model",
    "log_normal",
    "make_tiny_model",
    "run_in_virtual_time",
    "with_stragglers",
]
